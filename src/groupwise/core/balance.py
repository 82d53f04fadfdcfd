"""How evenly work is shared: groups dealt to ranks by their expected cost, and the share of time that ranks wait."""

from __future__ import annotations

import heapq
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

    whole: groups are dealt so that the rank with the most work has little more than the others; each rank begins with
    its dearest, so that passes which ranks run side by side are alike. spread: the members that are left over when a
    group is dealt to all ranks are followed by those of the group that costs most like it. Other placements are kept.
    """
    groups = torch.arange(len(costs))
    if shape.ranks == 1 or shape.placement not in ("whole", "spread") or bool((costs == costs[0]).all()):
        return groups
    dearest_first = costs.argsort(descending=True, stable=True)
    if shape.placement == "spread":
        return dearest_first
    by_rank = (
        groups.view(shape.ranks, -1),
        _deal_back_and_forth(dearest_first, shape.ranks),
        _deal_to_the_least_busy(dearest_first, costs, shape.ranks),
    )
    dealt = min(by_rank, key=lambda candidate: float(costs[candidate].sum(1).max()))
    return dealt.gather(1, costs[dealt].argsort(dim=1, descending=True, stable=True)).flatten()


def _deal_back_and_forth(dearest_first: Tensor, ranks: int) -> Int64[Tensor, "ranks groups"]:
    """No rank's sum then differs from another's by more than single costs do."""
    dealt = dearest_first.view(-1, ranks).clone()
    dealt[1::2] = dealt[1::2].flip(1)
    return dealt.T


def _deal_to_the_least_busy(dearest_first: Tensor, costs: Tensor, ranks: int) -> Int64[Tensor, "ranks groups"]:
    """One after the other to the rank with the least work, among those that do not have all their groups yet."""
    per_rank = len(costs) // ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    least_busy = [(0.0, rank) for rank in range(ranks)]
    for group, cost in zip(dearest_first.tolist(), costs[dearest_first].tolist(), strict=True):
        work, rank = heapq.heappop(least_busy)
        dealt[rank].append(group)
        if len(dealt[rank]) < per_rank:
            heapq.heappush(least_busy, (work + cost, rank))
    return torch.tensor(dealt)
