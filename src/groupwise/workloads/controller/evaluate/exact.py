"""The exact expected reward: a frozen model's answer to every configuration can be known, so nothing need be sampled.

    E[reward] = sum over configurations of p(tier) p(position | tier) p(blocks | ...) p(top-k | ...) x reward

It is differentiable: its gradient is what the estimates of GRPO scatter around, and training on it is the upper
reference for what sampling a few members of a group can reach.
Questions under every budget, and how right every configuration is on each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from groupwise.core.config import RewardConfig
from groupwise.core.reward import weigh
from groupwise.core.types import RewardTerms
from groupwise.workloads.controller.conditions import Conditions, make_conditions
from groupwise.workloads.controller.rewards import ACCURACY
from groupwise.workloads.controller.task import Question
from groupwise.workloads.controller.workload import ControllerWorkload

Tables = Float[Tensor, "rows tiers positions top_ks blocks"]


def expected_reward(
    workload: ControllerWorkload,
    conditions: Conditions,
    rows: Int64[Tensor, " rows"],
    weights: Mapping[str, float] | None = None,
) -> Float[Tensor, " rows"]:
    """The mean reward of the present policy on each condition, with gradient."""
    rewards = reward_of_configurations(workload, conditions, rows, weights)
    chances = workload.controller.configuration_logp(conditions, rows).exp()
    return (chances * rewards.to(chances)).flatten(1).sum(1)


def best_reward(
    workload: ControllerWorkload,
    conditions: Conditions,
    rows: Int64[Tensor, " rows"],
    weights: Mapping[str, float] | None = None,
) -> Float[Tensor, " rows"]:
    """The most that any allowed configuration earns on each condition; it includes luck that nobody can foresee."""
    rewards = reward_of_configurations(workload, conditions, rows, weights)
    return rewards.masked_fill(~conditions.fits(rows), -torch.inf).flatten(1).amax(1)


@torch.no_grad()
def reward_of_configurations(
    workload: ControllerWorkload,
    conditions: Conditions,
    rows: Int64[Tensor, " rows"],
    weights: Mapping[str, float] | None = None,
) -> Tables:
    """What every configuration earns on each condition."""
    medians, _ = conditions.estimates(rows)
    graded = grades_of_configurations(workload, conditions.question_of(rows))
    ratio = medians / conditions.budget_ms[rows].view(-1, 1, 1, 1, 1)
    terms = {**graded, **workload.terms_of(ratio, workload.cost.expand_as(ratio))}
    flat = RewardTerms({name: values.flatten() for name, values in terms.items()})
    return weigh(flat, RewardConfig(weights=weights or {})).total.view_as(ratio)


@torch.no_grad()
def accuracy_of_configurations(workload: ControllerWorkload, questions: Sequence[Question]) -> Tables:
    """How right the model is under every configuration."""
    return grades_of_configurations(workload, questions)[ACCURACY]


@torch.no_grad()
def grades_of_configurations(workload: ControllerWorkload, questions: Sequence[Question]) -> dict[str, Tables]:
    """Every reward function under every configuration; each distinct answer to a question is graded once."""
    distinct = {question.sample.name: question for question in questions}
    said = {name: workload.task.answer_all(question) for name, question in distinct.items()}
    pairs = list(dict.fromkeys((name, text) for name, texts in said.items() for text in texts))
    graded = workload.grade_answers([distinct[name] for name, _ in pairs], [text for _, text in pairs])
    tables = {}
    for term, values in graded.per_rollout.items():
        grades = dict(zip(pairs, values.tolist(), strict=True))
        rows = {name: torch.tensor([grades[name, text] for text in texts]) for name, texts in said.items()}
        table = torch.stack([rows[question.sample.name] for question in questions])
        tables[term] = table.double().view(len(questions), *workload.cost.shape)
    return tables


@dataclass(frozen=True)
class EvaluationSet:
    """Configurations are numbered in the order of `KnobOptions.configurations()`, conditions as in `Conditions`."""

    conditions: Conditions
    accuracy: Float[Tensor, "questions configurations"]
    median_ms: Float[Tensor, "questions configurations"]
    upper_ms: Float[Tensor, "questions configurations"]

    @property
    def questions(self) -> Sequence[Question]:
        return self.conditions.questions

    @property
    def budget_ms(self) -> Float[Tensor, "questions budgets"]:
        return self.conditions.budget_ms.view(len(self.questions), -1)

    @cached_property
    def fitting(self) -> Bool[Tensor, "questions budgets configurations"]:
        """By the estimator's high quantile, however the controller was trained; where nothing fits, the cheapest."""
        fits = self.upper_ms[:, None] <= self.budget_ms[..., None]
        cheapest = torch.zeros_like(self.upper_ms, dtype=torch.bool)
        cheapest.scatter_(1, self.upper_ms.argmin(1, keepdim=True), True)
        return torch.where(fits.any(2, keepdim=True), fits, cheapest[:, None])

    def score(self, choices: Int64[Tensor, "questions budgets"]) -> Float[Tensor, "questions budgets"]:
        """How right each choice turned out."""
        return self.accuracy.gather(1, choices)


def build_evaluation_set(workload: ControllerWorkload, questions: Sequence[Question]) -> EvaluationSet:
    """Ask everything: remembered answers where there are some, else the model."""
    task, options = workload.task, workload.options
    workload.introduce(questions)
    # Questions that nothing fits are counted here: training has not seen them, so it could not refuse them.
    budget = replace(workload.config.budget, on_impossible="cheapest")
    conditions = make_conditions(questions, task.estimator, options, budget)
    medians, highs = (table[conditions.table].flatten(1) for table in (conditions.median_ms, conditions.upper_ms))
    return EvaluationSet(conditions, accuracy_of_configurations(workload, questions).flatten(1), medians, highs)
