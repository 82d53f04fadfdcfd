"""Conditions: every question under every budget, with estimated latencies and the configurations that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.groups import group_id
from groupwise.workloads.controller.config import Budget, BudgetConfig, infeasible_budget_error
from groupwise.workloads.controller.latency.estimates import (
    KnobLatencyModel,
    LatencyTableCache,
    LatencyTables,
    ProportionalEstimator,
)
from groupwise.workloads.controller.model.knobs import KnobOptions
from groupwise.workloads.controller.task import Question

ConditionIndices = Int64[Tensor, " rows"]
Tables = Float[Tensor, "rows tiers positions top_ks blocks"]


@dataclass(frozen=True)
class Conditions:
    """Condition c asks question c // budgets under budget c % budgets."""

    questions: Sequence[Question]
    config: BudgetConfig
    table_index: Int64[Tensor, " questions"]
    """Questions with prompts of equal length share a latency table."""
    median_ms: Float[Tensor, "tables tiers positions top_ks blocks"]
    upper_ms: Float[Tensor, "tables tiers positions top_ks blocks"]
    budget_ms: Float[Tensor, " conditions"]
    relative_budget: Float[Tensor, " conditions"]
    """The budget between the bound of the cheapest configuration (0) and that of the full one (1)."""
    infeasible: Bool[Tensor, " conditions"]
    """No configuration fits: the cheapest is used."""
    group_ids: Int64[Tensor, " conditions"]

    def __len__(self) -> int:
        return len(self.budget_ms)

    def question_of(self, rows: ConditionIndices) -> list[Question]:
        return [self.questions[row // len(self.config.values)] for row in rows.tolist()]

    def budget_of(self, row: int) -> Budget:
        return self.config.budgets[row % len(self.config.values)]

    def estimates(self, rows: ConditionIndices) -> tuple[Tables, Tables]:
        """Medians and upper quantiles of every configuration."""
        tables = self.table_index[rows // len(self.config.values)]
        return self.median_ms[tables], self.upper_ms[tables]

    def feasible(self, rows: ConditionIndices) -> Bool[Tensor, "rows tiers positions top_ks blocks"]:
        """What may be chosen. With soft enforcement, everything; where no configuration fits, the cheapest alone."""
        bound_ms = self.bound_ms(rows)
        limit_ms = self.budget_ms[rows] if self.config.is_hard else torch.full((len(rows),), torch.inf)
        within = bound_ms <= limit_ms.view(-1, 1, 1, 1, 1)
        flat = bound_ms.flatten(1)
        cheapest = torch.zeros_like(flat, dtype=torch.bool).scatter(1, flat.argmin(1, keepdim=True), True)
        return torch.where(self.infeasible[rows].view(-1, 1, 1, 1, 1), cheapest.view_as(within), within)

    def bound_ms(self, rows: ConditionIndices) -> Tables:
        """What is compared with the budget: the upper quantile with hard enforcement, else the median."""
        medians, uppers = self.estimates(rows)
        return uppers if self.config.is_hard else medians

    def over_budget(self, rows: ConditionIndices, choices: Int64[Tensor, "rows 4"]) -> Bool[Tensor, " rows"]:
        """Whether the chosen configuration is estimated not to fit."""
        return value_of_choices(self.bound_ms(rows), choices) > self.budget_ms[rows]

    def infeasible_budget_error(self, row: int, **remedy: str) -> UserError:
        """Why the budget of an infeasible condition is refused."""
        budget, budget_ms = self.budget_of(row), float(self.budget_ms[row])
        (bound_ms,) = self.bound_ms(torch.tensor([row]))
        shown = replace(budget, value=budget_ms) if budget.unit == "ms" else budget
        return infeasible_budget_error(
            shown, budget_ms, float(bound_ms.min()), full_configuration(bound_ms).item(), **remedy
        )


def value_of_choices(tables: Tables, choices: Int64[Tensor, "rows 4"]) -> Float[Tensor, " rows"]:
    """Each row's entry for the configuration it chose."""
    return tables[(torch.arange(len(tables)), *choices.unbind(1))]


def full_configuration(tables: Float[Tensor, "*tables tiers positions top_ks blocks"]) -> Float[Tensor, "*tables"]:
    """The full configuration's entry."""
    return tables[..., -1, 0, -1, -1]


def _cheapest(tables: Tables) -> Float[Tensor, " rows"]:
    return tables.flatten(1).amin(1)


def relative_budgets(bound_ms: Tables, budget_ms: Float[Tensor, "rows budgets"]) -> Float[Tensor, "rows budgets"]:
    """Each row's budgets between its cheapest configuration (0) and its full one (1)."""
    full_ms, cheapest_ms = full_configuration(bound_ms)[:, None], _cheapest(bound_ms)[:, None]
    return ((budget_ms - cheapest_ms) / (full_ms - cheapest_ms).clamp(min=1e-9)).clamp(0, 1)


def make_conditions(
    questions: Sequence[Question], estimator: KnobLatencyModel, options: KnobOptions, config: BudgetConfig
) -> Conditions:
    """Estimate every configuration of every question; refuse a budget that no configuration fits, if so configured."""
    if config.unit == "ms" and isinstance(estimator, ProportionalEstimator):
        raise UserError(
            "workload.budget.unit is 'ms', but the estimator knows proportions of work, not milliseconds. Give budgets"
            " as fractions, or an estimator that was measured: 'auto', or a file of `groupwise profile`."
        )
    lengths = [tuple(question.prompt_tokens[tier] for tier in options.crops_by_tier) for question in questions]
    index_of = {length: index for index, length in enumerate(dict.fromkeys(lengths))}
    cache = LatencyTableCache(estimator, options, config.scope)
    tables = [cache.tables(dict(zip(options.crops_by_tier, length, strict=True))) for length in index_of]
    table_index = torch.tensor([index_of[length] for length in lengths])
    full_ms = [full_configuration(table.bound_ms(is_hard=config.is_hard)).item() for table in tables]
    budget_ms = torch.stack([_in_ms(config, full_ms[index]) for index in table_index.tolist()])
    conditions = build_conditions(questions, config, tables, table_index, budget_ms)
    if conditions.infeasible.any() and config.on_infeasible == "refuse":
        raise conditions.infeasible_budget_error(int(conditions.infeasible.nonzero()[0]))
    return conditions


def check_some_fit(conditions: Conditions) -> None:
    """Refuse to train where no configuration fits any budget: the cheapest one would always be used."""
    if not conditions.infeasible.all():
        return
    row = int(conditions.budget_ms.argmax())
    (bound_ms,) = conditions.bound_ms(torch.tensor([row]))
    cheapest_ms, full_ms = float(bound_ms.min()), full_configuration(bound_ms).item()
    smallest = f"{cheapest_ms / full_ms:.3g}" if conditions.budget_of(row).unit == "fraction" else f"{cheapest_ms:.4g}"
    raise UserError(
        f"Nothing fits: the largest of workload.budget.values is {conditions.budget_of(row)}"
        f" ({float(conditions.budget_ms[row]):.4g} ms), and the cheapest configuration is estimated at"
        f" {cheapest_ms:.4g} ms (the full one at {full_ms:.4g} ms). Under each budget the cheapest configuration would"
        f" be used, and there would be nothing to learn. Give at least one budget above {smallest}."
    )


def build_conditions(
    questions: Sequence[Question],
    config: BudgetConfig,
    tables: Sequence[LatencyTables],
    table_index: Int64[Tensor, " questions"],
    budget_ms: Float[Tensor, "questions budgets"],
) -> Conditions:
    """Conditions from known latency tables, each question under as many budgets as the config has."""
    bound_ms = torch.stack([table.bound_ms(is_hard=config.is_hard) for table in tables])
    ids = [
        condition_id(row * len(config.budgets) + column, question, budget, ms)
        for row, question in enumerate(questions)
        for column, (budget, ms) in enumerate(zip(config.budgets, budget_ms[row].tolist(), strict=True))
    ]
    return Conditions(
        questions,
        config,
        table_index,
        torch.stack([table.median_ms for table in tables]),
        torch.stack([table.upper_ms for table in tables]),
        budget_ms.flatten(),
        relative_budgets(bound_ms[table_index], budget_ms).flatten(),
        (_cheapest(bound_ms)[table_index, None] > budget_ms).flatten(),
        torch.tensor(ids),
    )


def condition_id(index: int, question: Question, budget: Budget, budget_ms: float) -> int:
    """A group is a question *and* a budget: answers under different budgets are never compared."""
    return group_id(index, question.sample.name, question.text, budget_ms, budget.scope)


def _in_ms(config: BudgetConfig, full_ms: float) -> Float[Tensor, " budgets"]:
    return torch.tensor([budget.in_ms(full_ms) for budget in config.budgets], dtype=torch.float64)
