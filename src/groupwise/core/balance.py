"""How evenly work is shared: groups dealt to ranks by their expected cost, and the share of time that ranks wait."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.core.shape import StepShape

ConditionCosts = Callable[[Int64[Tensor, " conditions"]], Float[Tensor, " conditions"] | None]
"""The expected cost of a rollout of each condition, in any unit; None where all cost the same."""


def idle_share(work: Float[Tensor, "ranks stages"]) -> float:
    """The share of a step that a rank waits for the slowest one, on average: 1 - mean / max of the work time.

    Ranks wait for each other after each stage, so the slowest of each counts.
    """
    slowest = work.max(0).values.sum().item()
    return 1 - work.mean(0).sum().item() / slowest if slowest > 0 else 0.0


def order_by_cost(shape: StepShape, costs: Float[Tensor, " groups"]) -> Int64[Tensor, " groups"]:
    """In which order the step's groups take the places that the placement has for groups 0, 1, 2, ...

    whole: sorted by cost, groups are dealt to the ranks back and forth, so that no rank's sum differs from another's by
    more than the costs do; each rank runs its groups in their own order. spread: the members that are left over when a
    group is dealt to all ranks are followed by those of the group that costs most like it. Other placements are kept.
    """
    groups = torch.arange(len(costs))
    if shape.ranks == 1 or shape.placement not in ("whole", "spread") or bool((costs == costs[0]).all()):
        return groups
    dearest_first = costs.argsort(descending=True, stable=True)
    if shape.placement == "spread":
        return dearest_first
    dealt = dearest_first.view(-1, shape.ranks).clone()
    dealt[1::2] = dealt[1::2].flip(1)
    return dealt.sort(0).values.T.flatten()
