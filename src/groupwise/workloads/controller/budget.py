"""A latency budget: so much time, of the whole answer or up to its first token. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from groupwise.core.errors import UserError, require, require_types

Unit = Literal["fraction", "ms"]
Span = Literal["answer", "first_token"]
LARGEST_FRACTION = 4.0


@dataclass(frozen=True)
class Budget:
    """The time that one answer may take."""

    value: float
    unit: Unit = "ms"
    """`ms`, or `fraction` of what the full configuration is estimated to take on the same question: of its high
    quantile where the budget is guaranteed, of its median where missing it only costs. So everything fits at 1."""
    span: Span = "answer"
    """What is timed: the whole answer, or vision and prefill up to the first token."""

    def __post_init__(self) -> None:
        require_types(self, "budget.")
        require(self.unit in ("fraction", "ms"), "budget.unit", self.unit, "'fraction' or 'ms'")
        require(self.span in ("answer", "first_token"), "budget.span", self.span, "'answer' or 'first_token'")
        require(0 < self.value < math.inf, "budget", self.value, "a finite number above 0")
        if self.unit == "fraction" and self.value > LARGEST_FRACTION:
            raise UserError(
                f"The budget is {self.value:g} times the full configuration: nothing is left to choose beyond 1, so"
                f" fractions end at {LARGEST_FRACTION:g}. Were milliseconds meant? Then set the unit to ms."
            )

    def in_ms(self, full_ms: float) -> float:
        return self.value * full_ms if self.unit == "fraction" else self.value

    def __str__(self) -> str:
        what = "of the full configuration" if self.unit == "fraction" else "ms"
        return f"{self.value:g} {what}{' to the first token' if self.span == 'first_token' else ''}"


def refusal(
    budget: Budget, budget_ms: float, cheapest_ms: float, full_ms: float, *, how: str = "on_impossible 'cheapest'"
) -> UserError:
    """Why a budget that no configuration fits is refused, and what would do."""
    hint, in_ms = "", f" ({budget_ms:.4g} ms)" if budget.unit == "fraction" else ""
    if budget.unit == "ms" and cheapest_ms <= 1000 * budget_ms <= 20 * full_ms:
        hint = f" It looks like seconds: {budget_ms:g} s are {1000 * budget_ms:g} ms."
    return UserError(
        f"The budget {budget}{in_ms} is below the cheapest configuration, which is estimated at"
        f" {cheapest_ms:.4g} ms (the full one at {full_ms:.4g} ms).{hint} Give more, or ask for a best effort with"
        f" {how}: the cheapest configuration is then taken, and counted."
    )
