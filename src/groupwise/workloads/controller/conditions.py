"""Conditions: every question under every budget, with what is estimated to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.groups import group_id
from groupwise.workloads.controller.config import Budget, BudgetConfig, infeasible_budget_error
from groupwise.workloads.controller.latency.estimates import KnobLatencyModel, LatencyTableCache, LatencyTables
from groupwise.workloads.controller.model.knobs import KnobOptions
from groupwise.workloads.controller.task import Question

ConditionIndices = Int64[Tensor, " rows"]
Tables = Float[Tensor, "rows tiers positions top_ks blocks"]


@dataclass(frozen=True)
class Conditions:
    """Condition c asks question c // budgets under budget c % budgets."""

    questions: Sequence[Question]
    config: BudgetConfig
    table: Int64[Tensor, " questions"]
    """Questions with prompts of equal length share their estimates."""
    median_ms: Float[Tensor, "tables tiers positions top_ks blocks"]
    upper_ms: Float[Tensor, "tables tiers positions top_ks blocks"]
    budget_ms: Float[Tensor, " conditions"]
    budget_share: Float[Tensor, " conditions"]
    """Where the budget lies between the cheapest configuration (0) and the full one (1), by what is promised."""
    impossible: Bool[Tensor, " conditions"]
    """No configuration fits: the cheapest is taken."""
    group_ids: Int64[Tensor, " conditions"]

    def __len__(self) -> int:
        return len(self.budget_ms)

    def question_of(self, rows: ConditionIndices) -> list[Question]:
        return [self.questions[row // len(self.config.values)] for row in rows.tolist()]

    def budget_of(self, row: int) -> Budget:
        return self.config.budgets[row % len(self.config.values)]

    def estimates(self, rows: ConditionIndices) -> tuple[Tables, Tables]:
        """Medians and high quantiles of every configuration."""
        tables = self.table[rows // len(self.config.values)]
        return self.median_ms[tables], self.upper_ms[tables]

    def fits(self, rows: ConditionIndices) -> Bool[Tensor, "rows tiers positions top_ks blocks"]:
        """What may be chosen. With the penalty that is everything; where nothing fits, the cheapest alone."""
        promised_ms = self.promised_ms(rows)
        limit_ms = self.budget_ms[rows] if self.config.guaranteed else torch.full((len(rows),), torch.inf)
        fitting = promised_ms <= limit_ms.view(-1, 1, 1, 1, 1)
        flat = promised_ms.flatten(1)
        cheapest = torch.zeros_like(flat, dtype=torch.bool).scatter(1, flat.argmin(1, keepdim=True), True)
        return torch.where(self.impossible[rows].view(-1, 1, 1, 1, 1), cheapest.view_as(fitting), fitting)

    def promised_ms(self, rows: ConditionIndices) -> Tables:
        """What is held against the budget: the high quantile where it is guaranteed, else the median."""
        medians, highs = self.estimates(rows)
        return highs if self.config.guaranteed else medians

    def over_budget(self, rows: ConditionIndices, choices: Int64[Tensor, "rows 4"]) -> Bool[Tensor, " rows"]:
        """Whether what was chosen is estimated not to fit."""
        return value_of_choices(self.promised_ms(rows), choices) > self.budget_ms[rows]

    def refusal(self, row: int, **remedy: str) -> UserError:
        """Why the budget of a condition that nothing fits cannot be kept."""
        rows, budget, budget_ms = torch.tensor([row]), self.budget_of(row), float(self.budget_ms[row])
        (promised_ms,) = self.promised_ms(rows)
        told = replace(budget, value=budget_ms) if budget.unit == "ms" else budget
        return infeasible_budget_error(
            told, budget_ms, float(promised_ms.min()), full_configuration(promised_ms).item(), **remedy
        )


def value_of_choices(tables: Tables, choices: Int64[Tensor, "rows 4"]) -> Float[Tensor, " rows"]:
    """Each row's entry for what it chose."""
    return tables[(torch.arange(len(tables)), *choices.unbind(1))]


def full_configuration(tables: Float[Tensor, "*tables tiers positions top_ks blocks"]) -> Float[Tensor, "*tables"]:
    """The full configuration's entry."""
    return tables[..., -1, 0, -1, -1]


def _cheapest(tables: Tables) -> Float[Tensor, " rows"]:
    return tables.flatten(1).amin(1)


def relative_budgets(promised_ms: Tables, budget_ms: Float[Tensor, "rows budgets"]) -> Float[Tensor, "rows budgets"]:
    """Where each row's budgets lie between its cheapest configuration (0) and its full one (1)."""
    full_ms, cheapest_ms = full_configuration(promised_ms)[:, None], _cheapest(promised_ms)[:, None]
    return ((budget_ms - cheapest_ms) / (full_ms - cheapest_ms).clamp(min=1e-9)).clamp(0, 1)


def make_conditions(
    questions: Sequence[Question], estimator: KnobLatencyModel, options: KnobOptions, config: BudgetConfig
) -> Conditions:
    """Estimate every configuration of every question; refuse a budget that nothing fits, unless asked not to."""
    lengths = [tuple(question.prompt_tokens[tier] for tier in options.crops_by_tier) for question in questions]
    distinct = {length: number for number, length in enumerate(dict.fromkeys(lengths))}
    cache = LatencyTableCache(estimator, options, config.span)
    found = [cache.tables(dict(zip(options.crops_by_tier, each, strict=True))) for each in distinct]
    table = torch.tensor([distinct[length] for length in lengths])
    full_ms = [full_configuration(each.bound_ms(is_hard=config.guaranteed)).item() for each in found]
    budget_ms = torch.stack([_in_ms(config, full_ms[nth]) for nth in table.tolist()])
    made = build_conditions(questions, config, found, table, budget_ms)
    if made.impossible.any() and config.on_impossible == "refuse":
        raise made.refusal(int(made.impossible.nonzero()[0]))
    return made


def build_conditions(
    questions: Sequence[Question],
    config: BudgetConfig,
    found: Sequence[LatencyTables],
    table: Int64[Tensor, " questions"],
    budget_ms: Float[Tensor, "questions budgets"],
) -> Conditions:
    """Questions whose costs are known, each under as many budgets as the config has."""
    medians, highs = torch.stack([each.median_ms for each in found]), torch.stack([each.upper_ms for each in found])
    promised = torch.stack([each.bound_ms(is_hard=config.guaranteed) for each in found])
    ids = [
        condition_id(row * len(config.budgets) + nth, question, budget, ms)
        for row, question in enumerate(questions)
        for nth, (budget, ms) in enumerate(zip(config.budgets, budget_ms[row].tolist(), strict=True))
    ]
    return Conditions(
        questions,
        config,
        table,
        medians,
        highs,
        budget_ms.flatten(),
        relative_budgets(promised[table], budget_ms).flatten(),
        (_cheapest(promised)[table, None] > budget_ms).flatten(),
        torch.tensor(ids),
    )


def condition_id(index: int, question: Question, budget: Budget, budget_ms: float) -> int:
    """A group is a question *and* a budget: answers under different budgets are never compared."""
    return group_id(index, question.sample.name, question.text, budget_ms, budget.span)


def _in_ms(config: BudgetConfig, full_ms: float) -> Float[Tensor, " budgets"]:
    return torch.tensor([budget.in_ms(full_ms) for budget in config.budgets], dtype=torch.float64)
