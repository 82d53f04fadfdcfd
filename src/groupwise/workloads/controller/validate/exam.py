"""Questions under every budget, and how right every configuration is on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from groupwise.workloads.controller.conditions import Conditions, make_conditions
from groupwise.workloads.controller.exact import accuracies
from groupwise.workloads.controller.task import Question
from groupwise.workloads.controller.workload import ControllerWorkload


@dataclass(frozen=True)
class Exam:
    """Configurations are numbered in the order of `KnobOptions.all()`, conditions as in `Conditions`."""

    conditions: Conditions
    accuracy: Float[Tensor, "questions configurations"]
    median_ms: Float[Tensor, "questions configurations"]
    high_ms: Float[Tensor, "questions configurations"]

    @property
    def questions(self) -> Sequence[Question]:
        return self.conditions.questions

    @property
    def budget_ms(self) -> Float[Tensor, "questions budgets"]:
        return self.conditions.budget_ms.view(len(self.questions), -1)

    @cached_property
    def fitting(self) -> Bool[Tensor, "questions budgets configurations"]:
        """By the estimator's high quantile, however the controller was trained; where nothing fits, the cheapest."""
        fits = self.high_ms[:, None] <= self.budget_ms[..., None]
        cheapest = torch.zeros_like(self.high_ms, dtype=torch.bool)
        cheapest.scatter_(1, self.high_ms.argmin(1, keepdim=True), True)
        return torch.where(fits.any(2, keepdim=True), fits, cheapest[:, None])

    def score(self, choices: Int64[Tensor, "questions budgets"]) -> Float[Tensor, "questions budgets"]:
        """How right each choice turned out."""
        return self.accuracy.gather(1, choices)


def make_exam(workload: ControllerWorkload, questions: Sequence[Question]) -> Exam:
    """Ask everything: remembered answers where there are some, else the model."""
    task, options = workload.task, workload.options
    workload.introduce(questions)
    # Questions that nothing fits are counted here: training has not seen them, so it could not refuse them.
    budget = replace(workload.config.budget, on_impossible="cheapest")
    conditions = make_conditions(questions, task.estimator, options, budget)
    medians, highs = (table[conditions.table].flatten(1) for table in (conditions.median_ms, conditions.high_ms))
    return Exam(conditions, accuracies(workload, questions).flatten(1), medians, highs)
