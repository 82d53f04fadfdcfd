"""Four decisions a row: tier, insertion position, blocks, top-k. Sampled, scored and enumerated by the same network.
What the controller sees of a question: remembered, because nothing that is trained changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from groupwise.workloads.controller.conditions import ConditionIndices, Conditions
from groupwise.workloads.controller.model.executor import (
    Executor,
    PrefixStates,
    PromptKey,
    image_key,
    latency_tokens_of_image,
)
from groupwise.workloads.controller.model.knobs import KnobOptions, Knobs
from groupwise.workloads.controller.policy.network import ControllerNetwork, allowed_options, masked_log_softmax
from groupwise.workloads.controller.task import Question


class HiddenStateCache:
    """Prompt embeddings and latency tokens of one frozen model.

    The latency token's own embedding is not trained. That would need gradients through the model's first blocks for
    every rollout, and no state could be remembered; the budget, which it carries in other designs, reaches the second
    stage through the budget encoder instead.
    """

    def __init__(self, executor: Executor):
        self.executor = executor
        self._prompts: dict[tuple[int, ...], Float[Tensor, " width"]] = {}
        self._tokens: dict[PromptKey, Float[Tensor, "positions width"]] = {}
        self._pictures: dict[Hashable, list[Question]] = {}  # holds the questions: a picture is known by its object
        self.width: int = executor.adapter.text_config.hidden_size

    def introduce(self, questions: Sequence[Question]) -> None:
        """Questions that will be met, all of them: those about one picture are looked at together, when one is met.

        For where answers are known beforehand: nothing is left of such a look for them to go on from.
        """
        together: dict[Hashable, list[Question]] = {}
        for question in questions:
            together.setdefault(image_key(question.sample), []).append(question)
        self._pictures = together | self._pictures

    def prompts(self, questions: Sequence[Question]) -> Float[Tensor, "rows width"]:
        """The mean embedding of each question's tokens: known before any tier is chosen."""
        for question in questions:
            tokens = question.sample.question
            if tokens not in self._prompts:
                self._prompts[tokens] = self.embed(torch.tensor(tokens))
        return torch.stack([self._prompts[question.sample.question] for question in questions])

    def latency_tokens(
        self, questions: Sequence[Question], tiers: Int64[Tensor, " rows"], positions: Int64[Tensor, " rows"]
    ) -> tuple[Float[Tensor, "rows width"], PrefixStates | None]:
        """The hidden state of each row's latency token at its insertion position.

        Comes with what the model has computed for the questions that were new, and were not introduced. All tiers of a
        question run together, and no other question but those introduced with it: a state is the same bit by bit
        wherever and whenever it is computed, also after a resume.
        """
        tiers_by_number = list(self.executor.options.crops)
        passes = []
        for question in {each.sample.name: each for each in questions}.values():
            if (question.sample.name, tiers_by_number[0]) in self._tokens:
                continue
            samples = [each.sample for each in self._pictures.get(image_key(question.sample), [])]
            if question.sample.name in {sample.name for sample in samples}:
                found = latency_tokens_of_image(self.executor, samples)
            else:
                passes.append(self.executor.prefix([(question.sample, tier) for tier in tiers_by_number]))
                found = passes[-1].latency_tokens
            # a copy made here takes part in autograd; what inference mode leaves does not
            self._tokens |= {head: states.cpu().float().clone() for head, states in found.items()}
        rows = zip(questions, tiers.tolist(), positions.tolist(), strict=True)
        states = [self._tokens[each.sample.name, tiers_by_number[tier]][nth] for each, tier, nth in rows]
        return torch.stack(states), _join(passes) if passes else None

    @torch.no_grad()
    def embed(self, tokens: Int64[Tensor, " tokens"]) -> Float[Tensor, " width"]:
        """The mean embedding of these tokens."""
        return self.executor.adapter.embed(tokens).float().mean(0).cpu()


def _join(passes: Sequence[PrefixStates]) -> PrefixStates:
    """Several passes as one, for answers that go on from them together."""
    tokens = {head: states for each in passes for head, states in each.latency_tokens.items()}
    first = passes[0].known
    stores = [entry.name for entry in fields(first) if isinstance(getattr(first, entry.name), dict)]
    joined: dict[str, Any] = {
        name: {key: kept for each in passes for key, kept in getattr(each.known, name).items()} for name in stores
    }
    return PrefixStates(tokens, replace(first, **joined))


DECISIONS = ("tier", "insertion_position", "top_k", "blocks")
DECISION_ORDER = (0, 1, 3, 2)
"""In which they are taken: the number of blocks weighs more than the top-k, which then takes what time is left."""
Selector = Callable[[int, Float[Tensor, "rows options"]], Int64[Tensor, " rows"]]
"""Takes the number of the decision and the log-probabilities of its options; returns one option a row."""


@dataclass(frozen=True)
class ChosenKnobs:
    """What was chosen in each row, as numbers of options."""

    choices: Int64[Tensor, "rows 4"]
    logp: Float[Tensor, "rows 4"]
    entropy: Float[Tensor, "rows 4"]
    free: Bool[Tensor, "rows 4"]
    """False where one option alone was left: no decision."""
    prefix: PrefixStates | None
    """What the model has already computed for these rows, on the way to their latency tokens."""


class Controller:
    """The network with what it looks at."""

    def __init__(self, policy: ControllerNetwork, features: HiddenStateCache, device: torch.device):
        self.policy, self.features, self.device = policy, features, device

    def decide(self, conditions: Conditions, rows: ConditionIndices, pick: Selector) -> ChosenKnobs:
        """Decide in `DECISION_ORDER`, stage by stage: each option offered has a completion that fits.

        What members of a group share, the budget and the first stage, is computed once for them.
        """
        distinct, of_row = rows.unique(return_inverse=True)
        fits, questions = to_decision_order(conditions.feasible(distinct))[of_row], conditions.question_of(rows)
        prompts = self.features.prompts(conditions.question_of(distinct)).to(self.device)
        budget, shared = self._encoded(conditions, distinct), of_row.to(self.device)
        taken: list[Tensor] = []
        columns: list[tuple[Tensor, Tensor, Tensor]] = []

        def settle(logits: Tensor) -> None:
            options = allowed_options(fits, taken)
            logp = masked_log_softmax(logits, options.to(self.device))
            choice = pick(DECISION_ORDER[len(taken)], logp)
            entropy = -(logp.exp() * logp).sum(-1)
            columns.append((logp.gather(1, choice.to(self.device)[:, None])[:, 0], entropy, options.sum(1) > 1))
            taken.append(choice)

        for logits in self.policy.stage_one(prompts, budget):
            settle(logits.index_select(0, shared))
        tokens, prefix = self.features.latency_tokens(questions, taken[0], taken[1])
        top_k, blocks = self.policy.stage_two(tokens.to(self.device), taken[1].to(self.device), budget, shared)
        settle(blocks)
        settle(top_k)
        choices, logp, entropy, free = (
            torch.stack([column[nth] for nth in DECISION_ORDER], dim=1)
            for column in (taken, *zip(*columns, strict=True))
        )
        return ChosenKnobs(choices, logp, entropy, free.to(self.device), prefix)

    def path_logp(
        self, conditions: Conditions, rows: ConditionIndices
    ) -> Float[Tensor, "rows tiers positions top_ks blocks"]:
        """The log-probability of every configuration: the product of its four decisions'."""
        fits, questions = conditions.feasible(rows).to(self.device), conditions.question_of(rows)
        _, tiers, positions, _, _ = fits.shape
        budget = self._encoded(conditions, rows)
        tier, position = self.policy.stage_one(self.features.prompts(questions).to(self.device), budget)
        nth_row, nth_tier, nth_position = torch.cartesian_prod(
            torch.arange(len(rows)), torch.arange(tiers), torch.arange(positions)
        ).unbind(1)
        tokens, _ = self.features.latency_tokens([questions[row] for row in nth_row.tolist()], nth_tier, nth_position)
        places = nth_position.to(self.device), budget, nth_row.to(self.device)
        second = self.policy.stage_two(tokens.to(self.device), *places)
        top_k, blocks = (logits.view(len(rows), tiers, positions, -1) for logits in second)
        tier_logp = masked_log_softmax(tier, fits.flatten(2).any(2))
        position_logp = masked_log_softmax(position[:, None].expand(-1, tiers, -1), fits.flatten(3).any(3))
        blocks_logp = masked_log_softmax(blocks, fits.any(3))
        fits = to_decision_order(fits)
        top_k_logp = to_decision_order(masked_log_softmax(top_k[:, :, :, None].expand_as(fits), fits))
        first = tier_logp[:, :, None, None, None] + position_logp[..., None, None]
        return first + blocks_logp[:, :, :, None] + top_k_logp

    def _encoded(self, conditions: Conditions, rows: ConditionIndices) -> Float[Tensor, "rows encoded"]:
        return self.policy.encoder(conditions.relative_budget[rows].float().to(self.device))


def to_decision_order(tables: Shaped[Tensor, "rows tiers positions top_ks blocks"]) -> Shaped[Tensor, "rows ..."]:
    """With an axis for each decision in the order they are taken; `DECISION_ORDER` is its own inverse."""
    return tables.permute(0, *(1 + nth for nth in DECISION_ORDER))


def sample_option(chances: Float[Tensor, "rows 4"]) -> Selector:
    """Options drawn with the given uniform numbers, one a decision."""

    def pick(decision: int, logp: Tensor) -> Tensor:
        below = logp.detach().cpu().double().exp().cumsum(1) <= chances[:, decision, None]
        possible = logp.detach().cpu().exp() > 0
        last = possible.shape[1] - 1 - possible.flip(1).int().argmax(1)  # rounding may leave the sum below the number
        return torch.minimum(below.sum(1), last)

    return pick


def greedy_option(decision: int, logp: Float[Tensor, "rows options"]) -> Int64[Tensor, " rows"]:
    """The likeliest option."""
    return logp.argmax(1).cpu()


def replay_option(choices: Int64[Tensor, "rows 4"]) -> Selector:
    """The options that were chosen before."""
    return lambda decision, logp: choices[:, decision]


def choices_to_knobs(options: KnobOptions, choices: Int64[Tensor, "rows 4"]) -> list[Knobs]:
    """The numbers of options as settings of the model."""
    scales: Sequence[Sequence[object]] = (
        list(options.crops),
        options.insertion_positions,
        options.top_ks,
        options.block_totals,
    )
    return [Knobs(*(scale[n] for scale, n in zip(scales, row, strict=True))) for row in choices.tolist()]
