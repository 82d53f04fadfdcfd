"""The settings of a controller's training. No torch here: the heavy parts are imported in `build`.
A latency budget: so much time, of the whole answer or up to its first token. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from groupwise.core.errors import UserError, require, require_types
from groupwise.workloads.base import WorkloadConfig

if TYPE_CHECKING:
    import torch

    from groupwise.workloads.controller.task import Task
    from groupwise.workloads.controller.workload import ControllerWorkload


Unit = Literal["fraction", "ms"]
BudgetScope = Literal["answer", "first_token"]
LARGEST_FRACTION = 4.0
BUDGET_DIM, STAGE_ONE_DIM, STAGE_TWO_DIM, NUM_FREQUENCIES = 256, 256, 128, 16
"""Widths of the controller network: the encoded budget, its two stages, and the sinusoids of a budget."""


@dataclass(frozen=True)
class Budget:
    """The time that one answer may take."""

    value: float
    unit: Unit = "ms"
    """`ms`, or `fraction` of what the full configuration is estimated to take on the same question: of its high
    quantile where the budget is guaranteed, of its median where missing it only costs. So everything fits at 1."""
    span: BudgetScope = "answer"
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


def infeasible_budget_error(
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


@dataclass(frozen=True)
class BudgetConfig:
    values: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    """Every question is asked under each of these budgets: a condition is a question and a budget."""
    unit: Unit = "fraction"
    """Of the values: `ms`, or `fraction` of what the full configuration is estimated to take on the same question (its
    high quantile with `guarantee`, its median with `penalty`): at 1 everything fits."""
    span: BudgetScope = "answer"
    """What the budget is for: the whole answer, or the time to the first token."""
    respect: Literal["guarantee", "penalty"] = "guarantee"
    """`guarantee`: what the estimator's high quantile says will not fit cannot be chosen. `penalty`: everything can be
    chosen, and the reward falls where the estimated median is over the budget."""
    on_impossible: Literal["refuse", "cheapest"] = "refuse"
    """When no configuration fits a budget: refuse to start, or take the cheapest and count it."""

    def __post_init__(self) -> None:
        require_types(self, "workload.budget.")
        require(bool(self.values), "workload.budget.values", self.values, "at least one number")
        require(len(set(self.values)) == len(self.values), "workload.budget.values", self.values, "all different")
        _ = self.budgets

    @property
    def guaranteed(self) -> bool:
        return self.respect == "guarantee"

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return tuple(Budget(float(value), self.unit, self.span) for value in self.values)


MIN_ANSWERS_FOR_QUANTILE = 40
"""Answers that an estimator must have seen to tell how far they stray."""


@dataclass(frozen=True)
class ControllerEvalConfig:
    """The final evaluation, `groupwise eval`."""

    tolerance: float = 0.05
    """An answer violates its budget when it takes longer by more than this share."""
    timed_answers: int = 100
    """Questions whose answers by the controller and by the lookup table are timed, under every budget."""
    timed_answers_of_others: int = 25
    """The same for every other method. Accuracy is of all questions."""
    runs_of_singles: int = 2
    """Timed answers of every single configuration."""
    imitation_steps: int = 200
    """Steps to train the imitation of the oracle; 0 leaves it out."""
    recalibration_answers: int = 200
    """Answers to training questions that set the estimator right beforehand, if a short look finds that the machine is
    at another pace than when it was profiled; 0 judges by the estimator as it is."""

    def __post_init__(self) -> None:
        require_types(self, "workload.eval.")
        require(self.tolerance >= 0, "workload.eval.tolerance", self.tolerance, "0 or more")
        least = {"timed_answers": 1, "timed_answers_of_others": 1, "runs_of_singles": 1, "imitation_steps": 0}
        for name, number in least.items():
            require(getattr(self, name) >= number, f"workload.eval.{name}", getattr(self, name), f"at least {number}")
        answers, rule = self.recalibration_answers, f"0, or at least {MIN_ANSWERS_FOR_QUANTILE}"
        require(
            answers == 0 or answers >= MIN_ANSWERS_FOR_QUANTILE, "workload.eval.recalibration_answers", answers, rule
        )


@dataclass(frozen=True)
class ControllerConfig(WorkloadConfig):
    """Subclass it beside a task: `task` says what is asked, of which model, and what an answer is estimated to take."""

    budget: BudgetConfig = field(default_factory=BudgetConfig)
    accuracy: str = "exact"
    """How right an answer is: `exact`, `vqa` (soft match with several annotators), or your own module:function with
    TRL's signature, reward(prompts, completions, answers, **columns)."""
    policy_seed: int = 0
    """Decides the controller's first weights."""
    eval_rows_per_pass: int = 64
    """Held-out conditions that are answered together. A memory knob."""
    eval: ControllerEvalConfig = field(default_factory=ControllerEvalConfig)

    def __post_init__(self) -> None:
        require_types(self, "workload.")
        require(self.eval_rows_per_pass >= 1, "workload.eval_rows_per_pass", self.eval_rows_per_pass, "at least 1")

    def task(self, device: torch.device) -> Task:
        """The model under its executor, its questions and its estimator; the same on every rank."""
        raise NotImplementedError(f"{type(self).__name__} must define task(device)")

    def build(self, device: torch.device) -> ControllerWorkload:
        from groupwise.workloads.controller.workload import ControllerWorkload

        return ControllerWorkload(self.task(device), self, device)
