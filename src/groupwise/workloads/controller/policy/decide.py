"""Controller: four masked decisions per row, sampled, scored and enumerated by the same network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from groupwise.core.transfer import send
from groupwise.workloads.controller.conditions import ConditionIndices, Conditions
from groupwise.workloads.controller.model.executor import PrefixStates
from groupwise.workloads.controller.model.knobs import KnobOptions, Knobs
from groupwise.workloads.controller.policy.hidden_states import HiddenStateCache
from groupwise.workloads.controller.policy.network import ControllerNetwork, allowed_options, masked_log_softmax
from groupwise.workloads.controller.task import Question

DECISIONS = ("tier", "insertion_position", "top_k", "blocks")
DECISION_ORDER = (0, 1, 3, 2)
"""The order in which they are taken: blocks matter more than top-k, which then uses the time that is left."""
Selector = Callable[[int, Float[Tensor, "rows options"]], Int64[Tensor, " rows"]]
"""Takes the index of the decision and the log-probs of its options; returns the index of one option per row."""


@dataclass(frozen=True)
class ChosenKnobs:
    """The decisions of each row, as indices of options."""

    choices: Int64[Tensor, "rows 4"]
    logp: Float[Tensor, "rows 4"]
    entropy: Float[Tensor, "rows 4"]
    has_choice: Bool[Tensor, "rows 4"]
    """False where a single option was allowed."""
    prefix: PrefixStates | None
    """What the model has computed for these rows on the way to their latency tokens."""


class Controller:
    """The network, and the hidden states that it reads."""

    def __init__(self, policy: ControllerNetwork, hidden_states: HiddenStateCache, device: torch.device):
        self.policy, self.hidden_states, self.device = policy, hidden_states, device

    def decide(self, conditions: Conditions, rows: ConditionIndices, selector: Selector) -> ChosenKnobs:
        """Decide in `DECISION_ORDER`, stage by stage. An option is allowed if some feasible configuration has it.

        What the members of a group share, the budget and stage one, is computed once for them.
        """
        distinct, of_row = rows.unique(return_inverse=True)
        feasible, questions = to_decision_order(conditions.feasible(distinct))[of_row], conditions.question_of(rows)
        embeddings, overviews = self._see(conditions.question_of(distinct))
        budget, shared = self._encode_budgets(conditions, distinct), send(of_row, self.device)
        taken: list[Tensor] = []
        columns: list[tuple[Tensor, Tensor, Tensor]] = []

        def choose(logits: Tensor) -> None:
            options = allowed_options(feasible, taken)
            logp = masked_log_softmax(logits, send(options, self.device))
            choice = selector(DECISION_ORDER[len(taken)], logp)
            entropy = -(logp.exp() * logp).sum(-1)
            columns.append((logp.gather(1, send(choice, self.device)[:, None])[:, 0], entropy, options.sum(1) > 1))
            taken.append(choice)

        for logits in self.policy.stage_one(embeddings, overviews, budget):
            choose(logits.index_select(0, shared))
        tokens, prefix = self.hidden_states.latency_tokens(questions, taken[0], taken[1])
        top_k, blocks = self.policy.stage_two(send(tokens, self.device), send(taken[1], self.device), budget, shared)
        choose(blocks)
        choose(top_k)
        choices, logp, entropy, has_choice = (
            torch.stack([column[decision] for decision in DECISION_ORDER], dim=1)
            for column in (taken, *zip(*columns, strict=True))
        )
        return ChosenKnobs(choices, logp, entropy, send(has_choice, self.device), prefix)

    def configuration_logp(
        self, conditions: Conditions, rows: ConditionIndices
    ) -> Float[Tensor, "rows tiers positions top_ks blocks"]:
        """The log-prob of every configuration: the sum over its four decisions."""
        feasible, questions = send(conditions.feasible(rows), self.device), conditions.question_of(rows)
        _, tiers, positions, _, _ = feasible.shape
        budget = self._encode_budgets(conditions, rows)
        tier, position = self.policy.stage_one(*self._see(questions), budget)
        row_index, tier_index, position_index = torch.cartesian_prod(
            torch.arange(len(rows)), torch.arange(tiers), torch.arange(positions)
        ).unbind(1)
        tokens, _ = self.hidden_states.latency_tokens(
            [questions[row] for row in row_index.tolist()], tier_index, position_index
        )
        stage_two = self.policy.stage_two(
            send(tokens, self.device), send(position_index, self.device), budget, send(row_index, self.device)
        )
        top_k, blocks = (logits.view(len(rows), tiers, positions, -1) for logits in stage_two)
        tier_logp = masked_log_softmax(tier, feasible.flatten(2).any(2))
        position_logp = masked_log_softmax(position[:, None].expand(-1, tiers, -1), feasible.flatten(3).any(3))
        blocks_logp = masked_log_softmax(blocks, feasible.any(3))
        feasible = to_decision_order(feasible)
        top_k_logp = to_decision_order(masked_log_softmax(top_k[:, :, :, None].expand_as(feasible), feasible))
        stage_one_logp = tier_logp[:, :, None, None, None] + position_logp[..., None, None]
        return stage_one_logp + blocks_logp[:, :, :, None] + top_k_logp

    def _see(self, questions: Sequence[Question]) -> tuple[Tensor, Tensor | None]:
        """What stage one knows of each question: its words, and the overview if it may look."""
        overviews = send(self.hidden_states.overviews(questions), self.device) if self.policy.sees_overview else None
        return send(self.hidden_states.question_embeddings(questions), self.device), overviews

    def _encode_budgets(self, conditions: Conditions, rows: ConditionIndices) -> Float[Tensor, "rows encoded"]:
        return self.policy.encoder(send(conditions.relative_budget[rows].float(), self.device))


def to_decision_order(tables: Shaped[Tensor, "rows tiers positions top_ks blocks"]) -> Shaped[Tensor, "rows ..."]:
    """With one axis per decision in the order they are taken; `DECISION_ORDER` is its own inverse."""
    return tables.permute(0, *(1 + decision for decision in DECISION_ORDER))


def sample_option(uniforms: Float[Tensor, "rows 4"]) -> Selector:
    """Sample by inverse CDF with the given uniform numbers, one per decision."""

    def select(decision: int, logp: Tensor) -> Tensor:
        on_host = logp.detach().cpu()
        below = on_host.double().exp().cumsum(1) <= uniforms[:, decision, None]
        possible = on_host.exp() > 0
        last = possible.shape[1] - 1 - possible.flip(1).int().argmax(1)  # rounding may leave the sum below the number
        return torch.minimum(below.sum(1), last)

    return select


def greedy_option(decision: int, logp: Float[Tensor, "rows options"]) -> Int64[Tensor, " rows"]:
    """The most probable option."""
    return logp.argmax(1).cpu()


def replay_option(choices: Int64[Tensor, "rows 4"]) -> Selector:
    """The options of given choices."""
    return lambda decision, logp: choices[:, decision]


def choices_to_knobs(options: KnobOptions, choices: Int64[Tensor, "rows 4"]) -> list[Knobs]:
    """Indices of options as knobs."""
    scales = list(options.choices.values())
    return [Knobs(*(scale[index] for scale, index in zip(scales, row, strict=True))) for row in choices.tolist()]
