"""The loss of one pass, as its share of the loss of the whole step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.core.config import LossConfig
from groupwise.core.errors import UserError
from groupwise.core.loss import (
    clipped_surrogate,
    denominators,
    kl_to_reference,
    masked_sum,
    per_decision,
    policy_gradient,
    probability_ratio,
)
from groupwise.core.types import Rollouts, Scored


@dataclass(frozen=True)
class Totals:
    """Counts over the whole step, all ranks: the only denominators there are."""

    decisions: int
    rollouts: int

    def of_rows(self, mask: Tensor, loss: LossConfig) -> Tensor:
        constant = loss.constant or 1.0
        counts = {"decisions": self.decisions, "rollouts": self.rollouts}
        return denominators(mask.cpu(), loss.denominator, **counts, constant=constant).to(mask.device)


def loss_of_pass(
    scored: Scored, rollouts: Rollouts, strengths: Tensor, totals: Totals, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """This pass's share of the step's loss, and its named parts."""
    mask = rollouts.mask
    denominator = totals.of_rows(mask, config)
    loss = _surrogate(scored, rollouts, strengths.to(scored.logp), denominator, config)
    parts: dict[str, Tensor] = {}
    if config.kl:
        parts["kl"] = _kl(scored, mask, denominator, config)
        loss = loss + config.kl * parts["kl"]
    if config.entropy and scored.entropy is None:
        raise UserError(_lacks("entropy", config.entropy, "entropy"))
    if scored.entropy is not None:
        parts["entropy"] = masked_sum(scored.entropy, mask, denominator)
        loss = loss - config.entropy * parts["entropy"]
    return loss, {"loss": loss} | parts


@torch.no_grad()
def watch_ratio(scored: Scored, rollouts: Rollouts, strengths: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """The ratio of every decision, and whether clipping holds it back."""
    per_rollout = config.ratio == "rollout"
    ratio = probability_ratio(scored.logp, rollouts.logp, rollouts.mask, per_rollout=per_rollout)
    gains = per_decision(strengths.to(ratio))
    held = ((ratio > 1 + config.clip_high) & (gains > 0)) | ((ratio < 1 - config.clip_low) & (gains < 0))
    return ratio[rollouts.mask], held[rollouts.mask]


def _kl(scored: Scored, mask: Tensor, denominator: Tensor, config: LossConfig) -> Tensor:
    """In closed form where the workload knows it, else estimated from the log-probabilities."""
    if scored.kl is not None:
        return masked_sum(scored.kl, mask, denominator)
    if scored.reference_logp is None:
        raise UserError(_lacks("kl", config.kl, "reference_logp"))
    return kl_to_reference(scored.logp, scored.reference_logp, mask, denominator=denominator)


def _surrogate(
    scored: Scored, rollouts: Rollouts, strengths: Tensor, denominator: Tensor, config: LossConfig
) -> Tensor:
    if config.kind == "clipped":
        return clipped_surrogate(
            scored.logp,
            rollouts.logp,
            strengths,
            rollouts.mask,
            denominator=denominator,
            clip=(config.clip_low, config.clip_high),
            per_rollout=config.ratio == "rollout",
        )
    # The pulls of a ranking are divided by the number of pairs already.
    shared = 1.0 if config.kind == "ranking" else denominator
    return policy_gradient(scored.logp, strengths, rollouts.mask, denominator=shared)


def _lacks(name: str, weight: float, field: str) -> str:
    return f"loss.{name} is {weight}, but the workload's score() gives no {field}. Give it, or set loss.{name} to 0."
