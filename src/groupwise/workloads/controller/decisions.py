"""Four decisions a row: tier, insertion position, blocks, top-k. Sampled, scored and enumerated by the same network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from groupwise.workloads.controller.conditions import Conditions, Rows
from groupwise.workloads.controller.executor import Prefix
from groupwise.workloads.controller.features import Features
from groupwise.workloads.controller.knobs import KnobOptions, Knobs
from groupwise.workloads.controller.policy import Policy, allowed, masked_log_softmax

DECISIONS = ("tier", "insertion_position", "top_k", "blocks")
ORDER = (0, 1, 3, 2)
"""In which they are taken: the number of blocks weighs more than the top-k, which then takes what time is left."""
Pick = Callable[[int, Float[Tensor, "rows options"]], Int64[Tensor, " rows"]]
"""Takes the number of the decision and the log-probabilities of its options; returns one option a row."""


@dataclass(frozen=True)
class Decisions:
    """What was chosen in each row, as numbers of options."""

    choices: Int64[Tensor, "rows 4"]
    logp: Float[Tensor, "rows 4"]
    entropy: Float[Tensor, "rows 4"]
    free: Bool[Tensor, "rows 4"]
    """False where one option alone was left: no decision."""
    prefix: Prefix | None
    """What the model has already computed for these rows, on the way to their latency tokens."""


class Controller:
    """The network with what it looks at."""

    def __init__(self, policy: Policy, features: Features, device: torch.device):
        self.policy, self.features, self.device = policy, features, device

    def decide(self, conditions: Conditions, rows: Rows, pick: Pick) -> Decisions:
        """Decide in `ORDER`, stage by stage: each option offered has a completion that fits.

        What members of a group share, the budget and the first stage, is computed once for them.
        """
        distinct, of_row = rows.unique(return_inverse=True)
        fits, questions = in_order(conditions.fits(distinct))[of_row], conditions.question_of(rows)
        prompts = self.features.prompts(conditions.question_of(distinct)).to(self.device)
        budget, shared = self._encoded(conditions, distinct), of_row.to(self.device)
        taken: list[Tensor] = []
        columns: list[tuple[Tensor, Tensor, Tensor]] = []

        def settle(logits: Tensor) -> None:
            options = allowed(fits, taken)
            logp = masked_log_softmax(logits, options.to(self.device))
            choice = pick(ORDER[len(taken)], logp)
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
            torch.stack([column[nth] for nth in ORDER], dim=1) for column in (taken, *zip(*columns, strict=True))
        )
        return Decisions(choices, logp, entropy, free.to(self.device), prefix)

    def path_logp(self, conditions: Conditions, rows: Rows) -> Float[Tensor, "rows tiers positions top_ks blocks"]:
        """The log-probability of every configuration: the product of its four decisions'."""
        fits, questions = conditions.fits(rows).to(self.device), conditions.question_of(rows)
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
        fits = in_order(fits)
        top_k_logp = in_order(masked_log_softmax(top_k[:, :, :, None].expand_as(fits), fits))
        first = tier_logp[:, :, None, None, None] + position_logp[..., None, None]
        return first + blocks_logp[:, :, :, None] + top_k_logp

    def _encoded(self, conditions: Conditions, rows: Rows) -> Float[Tensor, "rows encoded"]:
        return self.policy.encoder(conditions.budget_share[rows].float().to(self.device))


def in_order(tables: Shaped[Tensor, "rows tiers positions top_ks blocks"]) -> Shaped[Tensor, "rows ..."]:
    """With an axis for each decision in the order they are taken; `ORDER` is its own inverse."""
    return tables.permute(0, *(1 + nth for nth in ORDER))


def sampled(chances: Float[Tensor, "rows 4"]) -> Pick:
    """Options drawn with the given uniform numbers, one a decision."""

    def pick(decision: int, logp: Tensor) -> Tensor:
        below = logp.detach().cpu().double().exp().cumsum(1) <= chances[:, decision, None]
        possible = logp.detach().cpu().exp() > 0
        last = possible.shape[1] - 1 - possible.flip(1).int().argmax(1)  # rounding may leave the sum below the number
        return torch.minimum(below.sum(1), last)

    return pick


def greedy(decision: int, logp: Float[Tensor, "rows options"]) -> Int64[Tensor, " rows"]:
    """The likeliest option."""
    return logp.argmax(1).cpu()


def repeated(choices: Int64[Tensor, "rows 4"]) -> Pick:
    """The options that were chosen before."""
    return lambda decision, logp: choices[:, decision]


def knobs_of(options: KnobOptions, choices: Int64[Tensor, "rows 4"]) -> list[Knobs]:
    """The numbers of options as settings of the model."""
    scales: Sequence[Sequence[object]] = (
        list(options.crops),
        options.insertion_positions,
        options.top_ks,
        options.block_totals,
    )
    return [Knobs(*(scale[n] for scale, n in zip(scales, row, strict=True))) for row in choices.tolist()]
