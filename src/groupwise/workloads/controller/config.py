"""Settings of a controller's training and evaluation, and what a latency budget is. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from groupwise.core.errors import UserError, require, require_types
from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.workloads.base import WorkloadConfig

if TYPE_CHECKING:
    import torch

    from groupwise.workloads.controller.task import Task
    from groupwise.workloads.controller.workload import ControllerWorkload


Unit = Literal["fraction", "ms"]
BudgetScope = Literal["total", "first_token"]
LARGEST_FRACTION = 4.0
BUDGET_DIM, STAGE_ONE_DIM, STAGE_TWO_DIM, NUM_FREQUENCIES = 256, 256, 128, 16
"""Widths of the controller network: the encoded budget, its two stages, and the sinusoids of a budget."""
OVERVIEW_SIDE = 12
OVERVIEW_PIXELS = OVERVIEW_SIDE**2
"""What stage one sees of an image, if it looks."""


@dataclass(frozen=True)
class Budget:
    """The time that one answer may take."""

    value: float
    unit: Unit = "ms"
    """`ms`, or `fraction` of the full configuration's estimated latency on the same question: of its upper quantile
    with hard enforcement, of its median with soft enforcement. So every configuration fits a budget of 1."""
    scope: BudgetScope = "total"
    """What is timed: the whole answer, or vision and prefill up to the first token."""

    def __post_init__(self) -> None:
        require_types(self, "budget.")
        require(self.unit in ("fraction", "ms"), "budget.unit", self.unit, "'fraction' or 'ms'")
        require(self.scope in ("total", "first_token"), "budget.scope", self.scope, "'total' or 'first_token'")
        require(0 < self.value < math.inf, "budget", self.value, "a finite number above 0")
        if self.unit == "fraction" and self.value > LARGEST_FRACTION:
            raise UserError(
                f"The budget is {self.value:g} times the full configuration: every configuration fits from 1 on, so"
                f" fractions end at {LARGEST_FRACTION:g}. If milliseconds are meant, set the unit to ms."
            )

    @property
    def label(self) -> str:
        """A short name for metrics, such as `0.7` or `38ms`."""
        unit = "" if self.unit == "fraction" else "ms"
        return f"{self.value:g}{unit}{'_first_token' if self.scope == 'first_token' else ''}"

    def in_ms(self, full_ms: float) -> float:
        return self.value * full_ms if self.unit == "fraction" else self.value

    def __str__(self) -> str:
        unit = "of the full configuration" if self.unit == "fraction" else "ms"
        return f"{self.value:g} {unit}{' to the first token' if self.scope == 'first_token' else ''}"


def infeasible_budget_error(
    budget: Budget, budget_ms: float, cheapest_ms: float, full_ms: float, *, remedy: str = "on_infeasible 'cheapest'"
) -> UserError:
    """Why a budget that no configuration fits is refused, and what to do."""
    hint, in_ms = "", f" ({budget_ms:.4g} ms)" if budget.unit == "fraction" else ""
    if budget.unit == "ms" and cheapest_ms <= 1000 * budget_ms <= 20 * full_ms:
        hint = f" It looks like seconds: {budget_ms:g} s are {1000 * budget_ms:g} ms."
    return UserError(
        f"The budget {budget}{in_ms} is below the cheapest configuration, which is estimated at"
        f" {cheapest_ms:.4g} ms (the full one at {full_ms:.4g} ms).{hint} Raise the budget, or accept a best effort"
        f" with {remedy}: the cheapest configuration is then used, and such conditions are counted."
    )


@dataclass(frozen=True)
class BudgetConfig:
    values: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    """Every question is asked under each of these budgets: a condition is a question and a budget."""
    unit: Unit = "fraction"
    """Of the values: `ms`, or `fraction` of the full configuration's estimated latency on the same question (its upper
    quantile with hard enforcement, its median with soft): every configuration fits at 1."""
    scope: BudgetScope = "total"
    """What the budget covers: the whole answer, or the time to the first token."""
    enforcement: Literal["hard", "soft"] = "hard"
    """`hard`: a configuration whose estimated upper quantile exceeds the budget cannot be chosen. `soft`: every
    configuration can be chosen, and the reward falls where the estimated median exceeds the budget."""
    on_infeasible: Literal["refuse", "cheapest"] = "refuse"
    """When no configuration fits a budget: refuse to start, or use the cheapest one and count it."""

    def __post_init__(self) -> None:
        require_types(self, "workload.budget.")
        require(bool(self.values), "workload.budget.values", self.values, "at least one number")
        require(len(set(self.values)) == len(self.values), "workload.budget.values", self.values, "all different")
        _ = self.budgets

    @property
    def is_hard(self) -> bool:
        return self.enforcement == "hard"

    @cached_property
    def budgets(self) -> tuple[Budget, ...]:
        return tuple(Budget(float(value), self.unit, self.scope) for value in self.values)


MIN_ANSWERS_FOR_QUANTILE = 40
"""Measured answers that an estimator needs to tell an upper quantile."""


@dataclass(frozen=True)
class ControllerEvalConfig:
    """The final evaluation, `groupwise eval`."""

    tolerance: float = 0.05
    """An answer violates its budget when it takes longer by more than this fraction."""
    timed_answers: int = 100
    """Questions whose answers are timed under each budget, by the controller, the lookup table, the better table by
    words and the ceiling. What a controller adds is measured on twice as many pairs of answers."""
    timed_answers_other_methods: int = 25
    """The same for every other method. Accuracy is always measured on all test questions."""
    timed_answers_per_configuration: int = 0
    """Timed answers of each fixed configuration, besides those that some method chose. The chart shows configurations
    that were timed at least 5 times."""
    imitation_steps: int = 200
    """Training steps of the baseline that is trained on right answers instead of rewards; 0 leaves it out."""
    predictor_steps: int = 1000
    """Training steps of the baselines and the ceiling that predict the accuracy of each configuration; 0 leaves them
    out."""
    prefilled_questions: int = 2000
    """Questions, at most, that pass the model's first blocks at each tier to train imitation and the ceiling."""
    recalibration_answers: int = 200
    """Answers to training questions that recalibrate the estimator first, if a quick check finds that the machine's
    speed differs from when it was profiled; 0 keeps the estimator as it is."""

    def __post_init__(self) -> None:
        require_types(self, "workload.eval.")
        require(self.tolerance >= 0, "workload.eval.tolerance", self.tolerance, "0 or more")
        least = {
            "timed_answers": 1,
            "timed_answers_other_methods": 1,
            "timed_answers_per_configuration": 0,
            "imitation_steps": 0,
            "predictor_steps": 0,
            "prefilled_questions": 1,
        }
        for name, number in least.items():
            require(getattr(self, name) >= number, f"workload.eval.{name}", getattr(self, name), f"at least {number}")
        answers, rule = self.recalibration_answers, f"0, or at least {MIN_ANSWERS_FOR_QUANTILE}"
        require(
            answers == 0 or answers >= MIN_ANSWERS_FOR_QUANTILE, "workload.eval.recalibration_answers", answers, rule
        )


@dataclass(frozen=True)
class StageOneConfig:
    """The decision before the model runs: how finely the image is cropped, and where stage two decides."""

    sees: Literal["question", "overview"] = "overview"
    """`question`: the words and the budget. `overview`: also the whole image in 12 x 12 gray pixels, which costs next
    to nothing."""

    def __post_init__(self) -> None:
        require_types(self, "workload.stage1.")
        require(self.sees in ("question", "overview"), "workload.stage1.sees", self.sees, "'question' or 'overview'")

    @property
    def sees_overview(self) -> bool:
        return self.sees == "overview"


def kept_estimator(estimator: str, saved: Path) -> str:
    """The estimator of a resumed run: the saved one in place of `auto`, which might be fitted again."""
    file = saved / "estimator.json"
    return str(file) if estimator == "auto" and file.is_file() else estimator


@dataclass(frozen=True)
class ControllerConfig(WorkloadConfig):
    """Subclass it beside a task: `task` returns the model, the questions and the latency estimator."""

    budget: BudgetConfig = field(default_factory=BudgetConfig)
    stage1: StageOneConfig = field(default_factory=StageOneConfig)
    rewards: RewardFunctionsConfig = field(default_factory=lambda: RewardFunctionsConfig(functions=("exact",)))
    """How right an answer is: exact, vqa (soft match with several annotators), or a function or service of your own
    that takes (prompts, completions, answers, images). Without a name it is the reward `accuracy`; more rewards may be
    added as name=FUNCTION."""
    policy_seed: int = 0
    """Seed of the controller's initial weights."""
    eval_rows: int = 64
    """Held-out conditions that are answered together. A memory knob."""
    eval: ControllerEvalConfig = field(default_factory=ControllerEvalConfig)

    def __post_init__(self) -> None:
        require_types(self, "workload.")
        require(self.eval_rows >= 1, "workload.eval_rows", self.eval_rows, "at least 1")

    def task(self, device: torch.device) -> Task:
        """The model with its executor, the questions and the estimator; the same on every rank."""
        raise NotImplementedError(f"{type(self).__name__} must define task(device)")

    def build(self, device: torch.device) -> ControllerWorkload:
        from groupwise.workloads.controller.workload import ControllerWorkload

        return ControllerWorkload(self.task(device), self, device)
