"""Accuracy and reward of every configuration of a question. The frozen model's answers can all be computed, so the
policy's expected reward is exact:

    E[reward] = sum over configurations of p(tier) p(position | tier) p(blocks | ...) p(top-k | ...) x reward
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from groupwise.core.config import RewardConfig
from groupwise.core.reward import weigh
from groupwise.core.types import RewardTerms
from groupwise.workloads.controller.conditions import ConditionIndices, Conditions, Tables, make_conditions
from groupwise.workloads.controller.model.knobs import KnobOptions
from groupwise.workloads.controller.rewards import ACCURACY
from groupwise.workloads.controller.task import Question, Task
from groupwise.workloads.controller.workload import ControllerWorkload

Choices = Int64[Tensor, "questions budgets"]
"""A candidate's index for each question and budget."""


@dataclass(frozen=True)
class Candidate:
    """What a method may choose: a configuration, and the order in which its blocks are dropped."""

    configuration: int
    """Its index in `KnobOptions.configurations()`."""
    drop_order: tuple[int, ...]


def own_candidates(options: KnobOptions) -> list[Candidate]:
    """Each configuration in the model's own drop order: what the controller may choose."""
    order = tuple(options.drop_order)
    return [Candidate(index, order) for index, _ in enumerate(options.configurations())]


def all_candidates(task: Task, questions: Sequence[Question]) -> list[Candidate]:
    """`own_candidates`, then what the task's other drop orders add: configurations that compute something else, and
    whose answers to all these questions are known."""
    options, candidates = task.executor.options, own_candidates(task.executor.options)
    computed = set(computations(options, candidates))
    for order, answers in task.other_answers.items():
        known = [answers.get_all(question.sample.name) for question in questions]
        added = [
            Candidate(index, tuple(order))
            for index, _ in enumerate(options.configurations())
            if all(row is not None and row[index] is not None for row in known)
        ]
        for candidate, computation in zip(added, computations(options, added), strict=True):
            if computation not in computed:
                computed.add(computation)
                candidates.append(candidate)
    return candidates


def computations(options: KnobOptions, candidates: Sequence[Candidate]) -> list[Hashable]:
    """What the model computes for each candidate: its tier, and the top-k of each block. Several may be the same."""
    configurations = list(options.configurations())
    return [
        (knobs.tier, replace(options, drop_order=candidate.drop_order).block_path(knobs))
        for candidate in candidates
        for knobs in (configurations[candidate.configuration],)
    ]


def first_equal(options: KnobOptions, candidates: Sequence[Candidate]) -> list[int]:
    """For each candidate the index of the first that computes the same."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(computation, index) for index, computation in enumerate(computations(options, candidates))]


@dataclass(frozen=True)
class EvaluationSet:
    """Questions under each budget, with the accuracy and the estimated latency of each candidate."""

    conditions: Conditions
    candidates: Sequence[Candidate]
    """First `own_candidates`, then those of other drop orders."""
    accuracy: Float[Tensor, "questions candidates"]
    """NaN where a reward failed, or an answer in another drop order is not known."""
    median_ms: Float[Tensor, "questions candidates"]
    upper_ms: Float[Tensor, "questions candidates"]

    @property
    def questions(self) -> Sequence[Question]:
        return self.conditions.questions

    @property
    def pictures(self) -> list[str]:
        """The picture of each question: two questions about one are not independent."""
        return [question.image or question.sample.name for question in self.questions]

    @property
    def budget_ms(self) -> Float[Tensor, "questions budgets"]:
        return self.conditions.budget_ms.view(len(self.questions), -1)

    @property
    def num_budgets(self) -> int:
        return self.budget_ms.shape[1]

    def feasible(
        self, extra_ms: float = 0.0, limit_ms: Float[Tensor, "questions limits"] | None = None
    ) -> Bool[Tensor, "questions limits candidates"]:
        """By the estimator's upper quantile and `extra_ms`, whatever the enforcement; where nothing fits, the cheapest.

        `extra_ms` is what a method takes beyond the estimate: its own time less the controller's, which the estimate of
        a profiled machine includes. The limits are the budgets unless others are given.
        """
        limit_ms = self.budget_ms if limit_ms is None else limit_ms
        within = self.upper_ms[:, None] + extra_ms <= limit_ms[..., None]
        cheapest = torch.zeros_like(self.upper_ms, dtype=torch.bool)
        cheapest.scatter_(1, self.upper_ms.argmin(1, keepdim=True), True)
        return torch.where(within.any(2, keepdim=True), within, cheapest[:, None])

    def first(self, count: int) -> EvaluationSet:
        """The first questions alone."""
        conditions, rows = self.conditions, count * self.num_budgets
        fewer = replace(
            conditions,
            questions=conditions.questions[:count],
            table_index=conditions.table_index[:count],
            **{
                name: getattr(conditions, name)[:rows]
                for name in ("budget_ms", "relative_budget", "infeasible", "group_ids")
            },
        )
        tables = (table[:count] for table in (self.accuracy, self.median_ms, self.upper_ms))
        return EvaluationSet(fewer, self.candidates, *tables)

    def accuracy_of(self, choices: Choices) -> Float[Tensor, "questions budgets"]:
        return self.accuracy.gather(1, choices)


def build_evaluation_set(
    workload: ControllerWorkload, questions: Sequence[Question], candidates: Sequence[Candidate] | None = None
) -> EvaluationSet:
    """Answer the questions under each configuration: from precomputed or cached answers where there are any.

    Candidates of other drop orders are graded from the task's answers alone.
    """
    workload.register_precomputed(questions)
    # Training could not refuse infeasible budgets of questions it has not seen: here they are counted.
    budget = replace(workload.config.budget, on_infeasible="cheapest")
    conditions = make_conditions(questions, workload.task.estimator, workload.options, budget)
    own = own_candidates(workload.options)
    others = [] if candidates is None else list(candidates[len(own) :])
    accuracy = torch.cat(
        [
            accuracy_of_configurations(workload, questions).flatten(1),
            _accuracy_in_other_orders(workload, questions, others),
        ],
        dim=1,
    )
    configuration = torch.tensor([candidate.configuration for candidate in (*own, *others)])
    medians, uppers = (
        table[conditions.table_index].flatten(1)[:, configuration]
        for table in (conditions.median_ms, conditions.upper_ms)
    )
    return EvaluationSet(conditions, [*own, *others], accuracy, medians, uppers)


@torch.no_grad()
def accuracy_of_configurations(workload: ControllerWorkload, questions: Sequence[Question]) -> Tables:
    """Accuracy of the model under every configuration."""
    return grades_of_configurations(workload, questions)[ACCURACY]


@torch.no_grad()
def grades_of_configurations(workload: ControllerWorkload, questions: Sequence[Question]) -> dict[str, Tables]:
    """Each reward function under each configuration."""
    distinct = {question.sample.name: question for question in questions}
    answers = {
        name: workload.task.answer_all_configurations(question, rows_per_pass=workload.eval_rows)
        for name, question in distinct.items()
    }
    grades = _grade(workload, questions, answers)
    return {term: table.view(len(questions), *workload.compute_cost.shape) for term, table in grades.items()}


@torch.no_grad()
def _accuracy_in_other_orders(
    workload: ControllerWorkload, questions: Sequence[Question], candidates: Sequence[Candidate]
) -> Float[Tensor, "questions candidates"]:
    """From the task's precomputed answers; NaN where there is none."""
    task, answers = workload.task, {}
    for question in questions:
        known = {order: table.get_all(question.sample.name) for order, table in task.other_answers.items()}
        rows = [(known[candidate.drop_order], candidate.configuration) for candidate in candidates]
        tokens = [None if row is None else row[index] for row, index in rows]
        answers[question.sample.name] = [None if entry is None else task.decode(entry) for entry in tokens]
    if not any(text is not None for texts in answers.values() for text in texts):
        return torch.full((len(questions), len(candidates)), torch.nan, dtype=torch.float64)
    return _grade(workload, questions, answers)[ACCURACY]


def _grade(
    workload: ControllerWorkload, questions: Sequence[Question], answers: Mapping[str, Sequence[str | None]]
) -> dict[str, Float[Tensor, "questions answers"]]:
    """Each reward function on the answers to each sample; equal answers to a question are graded once."""
    distinct = {question.sample.name: question for question in questions}
    pairs = list(dict.fromkeys((name, text) for name, texts in answers.items() for text in texts if text is not None))
    graded = workload.grade([distinct[name] for name, _ in pairs], [text for _, text in pairs])
    tables = {}
    for term, values in graded.per_rollout.items():
        grades: dict[tuple[str, str | None], float] = dict(zip(pairs, values.tolist(), strict=True))
        rows = {
            name: torch.tensor([grades.get((name, text), torch.nan) for text in texts], dtype=torch.float64)
            for name, texts in answers.items()
        }
        tables[term] = torch.stack([rows[question.sample.name] for question in questions])
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
