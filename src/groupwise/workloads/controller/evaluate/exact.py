"""Accuracy and reward of every configuration of a question. The frozen model's answers can all be computed, so the
policy's expected reward is exact:

    E[reward] = sum over configurations of p(tier) p(position | tier) p(blocks | ...) p(top-k | ...) x reward
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
from groupwise.workloads.controller.conditions import ConditionIndices, Conditions, Tables, make_conditions
from groupwise.workloads.controller.rewards import ACCURACY
from groupwise.workloads.controller.task import Question
from groupwise.workloads.controller.workload import ControllerWorkload

Choices = Int64[Tensor, "questions budgets"]
"""A configuration's index for every question and budget, in the order of `KnobOptions.configurations()`."""


@dataclass(frozen=True)
class EvaluationSet:
    """Questions under every budget, with the accuracy and the estimated latency of every configuration."""

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

    @property
    def num_budgets(self) -> int:
        return self.budget_ms.shape[1]

    @cached_property
    def feasible(self) -> Bool[Tensor, "questions budgets configurations"]:
        """By the estimator's upper quantile, whatever the enforcement; where no configuration fits, the cheapest."""
        within = self.upper_ms[:, None] <= self.budget_ms[..., None]
        cheapest = torch.zeros_like(self.upper_ms, dtype=torch.bool)
        cheapest.scatter_(1, self.upper_ms.argmin(1, keepdim=True), True)
        return torch.where(within.any(2, keepdim=True), within, cheapest[:, None])

    def accuracy_of(self, choices: Choices) -> Float[Tensor, "questions budgets"]:
        return self.accuracy.gather(1, choices)


def build_evaluation_set(workload: ControllerWorkload, questions: Sequence[Question]) -> EvaluationSet:
    """Answer the questions under every configuration: from precomputed or cached answers where there are any."""
    workload.register_precomputed(questions)
    # Training could not refuse infeasible budgets of questions it has not seen: here they are counted.
    budget = replace(workload.config.budget, on_infeasible="cheapest")
    conditions = make_conditions(questions, workload.task.estimator, workload.options, budget)
    medians, uppers = (
        table[conditions.table_index].flatten(1) for table in (conditions.median_ms, conditions.upper_ms)
    )
    return EvaluationSet(conditions, accuracy_of_configurations(workload, questions).flatten(1), medians, uppers)


@torch.no_grad()
def accuracy_of_configurations(workload: ControllerWorkload, questions: Sequence[Question]) -> Tables:
    """Accuracy of the model under every configuration."""
    return grades_of_configurations(workload, questions)[ACCURACY]


@torch.no_grad()
def grades_of_configurations(workload: ControllerWorkload, questions: Sequence[Question]) -> dict[str, Tables]:
    """Every reward function under every configuration; equal answers to a question are graded once."""
    distinct = {question.sample.name: question for question in questions}
    answers = {
        name: workload.task.answer_all_configurations(question, rows_per_pass=workload.eval_rows)
        for name, question in distinct.items()
    }
    pairs = list(dict.fromkeys((name, text) for name, texts in answers.items() for text in texts))
    graded = workload.grade([distinct[name] for name, _ in pairs], [text for _, text in pairs])
    tables = {}
    for term, values in graded.per_rollout.items():
        grades = dict(zip(pairs, values.tolist(), strict=True))
        rows = {name: torch.tensor([grades[name, text] for text in texts]) for name, texts in answers.items()}
        table = torch.stack([rows[question.sample.name] for question in questions])
        tables[term] = table.double().view(len(questions), *workload.compute_cost.shape)
    return tables


@torch.no_grad()
def reward_of_configurations(
    workload: ControllerWorkload,
    conditions: Conditions,
    rows: ConditionIndices,
    weights: Mapping[str, float] | None = None,
) -> Tables:
    """The weighted reward of every configuration on each condition."""
    medians, _ = conditions.estimates(rows)
    graded = grades_of_configurations(workload, conditions.question_of(rows))
    ratio = medians / conditions.budget_ms[rows].view(-1, 1, 1, 1, 1)
    terms = {**graded, **workload.latency_terms(ratio, workload.compute_cost.expand_as(ratio))}
    flat = RewardTerms({name: values.flatten() for name, values in terms.items()})
    return weigh(flat, RewardConfig(weights=weights or {})).total.view_as(ratio)


def expected_reward(
    workload: ControllerWorkload,
    conditions: Conditions,
    rows: ConditionIndices,
    weights: Mapping[str, float] | None = None,
) -> Float[Tensor, " rows"]:
    """The current policy's mean reward on each condition, with gradient: what GRPO estimates from samples."""
    rewards = reward_of_configurations(workload, conditions, rows, weights)
    probabilities = workload.controller.configuration_logp(conditions, rows).exp()
    return (probabilities * rewards.to(probabilities)).flatten(1).sum(1)


def best_reward(
    workload: ControllerWorkload,
    conditions: Conditions,
    rows: ConditionIndices,
    weights: Mapping[str, float] | None = None,
) -> Float[Tensor, " rows"]:
    """The highest reward of any feasible configuration on each condition, known in hindsight only."""
    rewards = reward_of_configurations(workload, conditions, rows, weights)
    return rewards.masked_fill(~conditions.feasible(rows), -torch.inf).flatten(1).amax(1)
