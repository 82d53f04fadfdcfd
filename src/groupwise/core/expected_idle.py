"""The idle share to expect of a placement, by simulation: costs of rollouts are drawn, and ranks wait for the slowest.

Assumed: a rollout's cost is log-normal, as lengths of texts roughly are, with one factor for its condition (a prompt's
length, a budget), which is known beforehand, and one of its own (how long the answer gets), which is not. A rank's work
is the sum over its rollouts. All ranks are equally fast, and sending takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.balance import ConditionCosts, idle_share
from groupwise.core.errors import require
from groupwise.core.placement import Placement, place
from groupwise.core.randomness import normal
from groupwise.core.shape import StepShape

_COST_SALT = 0x636F7374
_SIMULATED_ROLLOUTS = 1 << 16
_MOST_STEPS = 16


@dataclass(frozen=True)
class CostSpread:
    """Standard deviations of the logarithms of the two factors: 0.5 is a factor of 1.65 up or down."""

    conditions: float = 0.3
    members: float = 0.5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(0 <= value <= 3, f"spread of {name}", value, "from 0 to 3")

    def of_conditions(self, conditions: Tensor) -> Float[Tensor, " conditions"]:
        """What is known beforehand."""
        return (self.conditions * normal(_COST_SALT, 0, conditions, 0, 0, 0)).exp()

    def of_rollouts(self, placed: Placement) -> Float[Tensor, " rollouts"]:
        own = normal(_COST_SALT, 1, placed.group, placed.member, 0, 0)
        return self.of_conditions(placed.condition) * (self.members * own).exp()


def expected_idle_share(
    shape: StepShape, spread: CostSpread, *, ordered: bool, seed: int = 0, wait_after_pass: bool = False
) -> float:
    """The mean over simulated steps; `ordered` deals groups by what is known of their cost.

    With `wait_after_pass` ranks wait after each pass, as those of a sharded update do, not only at the end.
    """
    shape = replace(shape, conditions=max(shape.conditions, 2 * shape.conditions_per_step))
    steps = max(1, min(_MOST_STEPS, _SIMULATED_ROLLOUTS // shape.rollouts_per_step))
    costs: ConditionCosts | None = spread.of_conditions if ordered else None
    shares = []
    for step in range(steps):
        placed = place(shape, seed=seed, step=step, costs=costs)
        column = placed.pass_index if wait_after_pass else torch.zeros_like(placed.pass_index)
        work = torch.zeros(shape.ranks, shape.passes, dtype=torch.float64)
        work.index_put_((placed.rank, column), spread.of_rollouts(placed).double(), accumulate=True)
        shares.append(idle_share(work))
    return sum(shares) / len(shares)
