"""BudgetLimit: the options that a decision has under a budget, looked up among plain numbers: each call of torch would
be felt in the answer of a small model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from groupwise.workloads.controller.conditions import Conditions, full_configuration
from groupwise.workloads.controller.latency.estimates import KnobTable
from groupwise.workloads.controller.policy.decide import DECISION_ORDER


class LeastBounds:
    """The least bound of the configurations that begin with given decisions, for each such beginning.

    Some configuration within a limit has an option if the least bound of those that have it is within the limit.
    """

    def __init__(self, bound_ms: KnobTable):
        tables = bound_ms.permute(DECISION_ORDER)
        self.after: list[Any] = [tables.flatten(taken).amin(taken).tolist() for taken in (1, 2, 3)] + [tables.tolist()]
        """By the number of decisions taken: nested lists, by the options taken and then by the next one."""
        self.full_ms = float(full_configuration(bound_ms))
        cheapest = [(table == table.amin()).nonzero()[0].tolist() for table in bound_ms]
        self.cheapest_of_tier = [
            [(tier, *choices)[decision] for decision in DECISION_ORDER] for tier, choices in enumerate(cheapest)
        ]
        """The first cheapest configuration of each tier, as indices of options in the order decisions are taken."""


class PacedBounds:
    """Bounds at a pace: each is a factor times what it was estimated at, plus a time that depends on the tier alone."""

    def __init__(self, least: LeastBounds, factor: float = 1.0, tier_ms: Sequence[float] | None = None):
        self._least, self._factor = least, factor
        self._tier_ms = tier_ms or [0.0] * len(least.cheapest_of_tier)
        self._of_tiers = [factor * ms + added_ms for ms, added_ms in zip(least.after[0], self._tier_ms, strict=True)]
        self.cheapest_ms, self.full_ms = min(self._of_tiers), factor * least.full_ms + self._tier_ms[-1]

    @property
    def cheapest(self) -> Sequence[int]:
        """The first cheapest configuration, as indices of options in the order decisions are taken."""
        return self._least.cheapest_of_tier[self._of_tiers.index(self.cheapest_ms)]

    def relative_budget(self, budget_ms: float) -> float:
        """As `conditions.relative_budgets`, for one question and budget."""
        share = (budget_ms - self.cheapest_ms) / max(self.full_ms - self.cheapest_ms, 1e-9)
        return min(max(share, 0.0), 1.0)

    def of_options(self, taken: Sequence[int]) -> Sequence[float]:
        """For each option of the next decision the least bound of those that have it, after the decisions taken."""
        if not taken:
            return self._of_tiers
        bounds, factor, tier_ms = self._least.after[len(taken)], self._factor, self._tier_ms[taken[0]]
        for choice in taken:
            bounds = bounds[choice]
        return [factor * ms + tier_ms for ms in bounds]


@dataclass(frozen=True)
class BudgetLimit:
    """A budget in the terms of the controller."""

    bounds: PacedBounds
    limit_ms: float
    """Infinite where the budget is soft."""
    relative_budget: float
    """Where the budget is between the cheapest configuration (0) and the full one (1)."""

    def allowed(self, taken: Sequence[int]) -> Sequence[int]:
        """Options of the next decision that some configuration within the limit has; if none fits, the cheapest one's.

        `taken` are the decisions so far, in the order they are taken.
        """
        if self.bounds.cheapest_ms > self.limit_ms:
            return [self.bounds.cheapest[len(taken)]]
        return [option for option, ms in enumerate(self.bounds.of_options(taken)) if ms <= self.limit_ms]


def budget_limit(bounds: PacedBounds, budget_ms: float, relative_budget: float, *, is_hard: bool) -> BudgetLimit:
    """Under a soft budget every configuration can be chosen, if some fits; else what fits, or the cheapest."""
    unlimited = not is_hard and bounds.cheapest_ms <= budget_ms
    return BudgetLimit(bounds, inf if unlimited else budget_ms, relative_budget)


class ConditionLimits:
    """The limits of conditions. What they share is computed once, as for requests with prompts of one length."""

    def __init__(self, conditions: Conditions):
        self._is_hard, self._budgets = conditions.config.is_hard, len(conditions.config.values)
        self._table_index = conditions.table_index.tolist()
        bound_ms = conditions.upper_ms if self._is_hard else conditions.median_ms
        self._least = [LeastBounds(table) for table in bound_ms]
        self._budget_ms, self._relative_budget = conditions.budget_ms.tolist(), conditions.relative_budget.tolist()

    def __getitem__(self, row: int) -> BudgetLimit:
        bounds = PacedBounds(self._least[self._table_index[row // self._budgets]])
        return budget_limit(bounds, self._budget_ms[row], self._relative_budget[row], is_hard=self._is_hard)
