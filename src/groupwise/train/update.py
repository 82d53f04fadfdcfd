"""One step's rollouts and advantages into new weights, in passes whose number cannot change the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.core.config import LossConfig
from groupwise.core.errors import UserError
from groupwise.core.loss import (
    clipped_surrogate,
    count_pairs,
    denominators,
    kl_to_reference,
    masked_sum,
    pairwise_ranking,
    policy_gradient,
    probability_ratio,
    ranking_pulls,
)
from groupwise.core.types import Advantages, Rollouts, Scored
from groupwise.dist.comm import Comm
from groupwise.train.config import Config
from groupwise.train.state import State, learning_rate
from groupwise.workloads.base import Workload


@dataclass(frozen=True)
class Totals:
    """Counts over the whole step, all ranks: the only denominators there are."""

    decisions: int
    rollouts: int
    widest: int
    pairs: int

    def of_rows(self, mask: Tensor, loss: LossConfig) -> Tensor:
        constant = loss.constant if loss.constant is not None else float(max(1, self.rollouts * self.widest))
        return denominators(
            mask, loss.denominator, decisions=self.decisions, rollouts=self.rollouts, constant=constant
        ).to(mask.device)


@dataclass(frozen=True)
class Comparison:
    """The whole step's groups and rewards, and this rank's share of them."""

    group_ids: Tensor
    rewards: Tensor
    advantages: Advantages
    mine: slice


def update(
    workload: Workload, rollouts: Rollouts, comparison: Comparison, *, state: State, config: Config, comm: Comm
) -> dict[str, float]:
    """Change the policy `updates_per_rollout` times; nothing at all where no group has spread."""
    kept = comparison.advantages.trained[comparison.mine].nonzero().flatten()
    batch = rollouts.select(kept)
    totals = _count(batch, comparison, config, comm)
    if not totals.decisions:
        return {"trained_rollouts": 0.0}
    figures: dict[str, float] = {}
    for _ in range(config.optimiser.updates_per_rollout):
        strengths, extra = _strengths(workload, rollouts, comparison, config, comm, fresh=not figures)
        figures = accumulate(workload, batch, strengths[kept], totals, config=config, comm=comm, state=state)
        figures |= _apply(state, config) | extra
    return figures | {"trained_rollouts": float(totals.rollouts)}


def accumulate(
    workload: Workload, batch: Rollouts, strengths: Tensor, totals: Totals, *, config: Config, comm: Comm, state: State
) -> dict[str, float]:
    """The gradient of the step's loss, summed over passes and ranks. Returns its figures, averaged over the step."""
    state.optimiser.zero_grad(set_to_none=True)
    sums: dict[str, float] = dict.fromkeys(("loss", "kl", "entropy", "ratio_mean", "clip_share"), 0.0)
    highest, lowest = 1.0, 1.0
    for rows in cut(len(batch), config.rows_per_pass):
        part = batch.select(rows)
        scored = workload.score(part)
        loss, parts = loss_of_pass(scored, part, strengths[rows], totals, config.loss)
        loss.backward()
        for name, value in parts.items():
            sums[name] += value.item()
        ratio, clipped = _watch_ratio(scored, part, config.loss)
        sums["ratio_mean"] += ratio.sum().item() / totals.decisions
        sums["clip_share"] += clipped.sum().item() / totals.decisions
        if len(ratio):
            highest, lowest = max(highest, ratio.max().item()), min(lowest, ratio.min().item())
    comm.sum_gradients(state.trainable)
    figures = dict(zip(sums, comm.sum(*sums.values()), strict=True))
    for switched_off in {"kl", "entropy"} - {name for name, value in figures.items() if value}:
        del figures[switched_off]
    highest, negative_lowest = comm.max(highest, -lowest)
    return figures | {"ratio_max": highest, "ratio_min": -negative_lowest}


def loss_of_pass(
    scored: Scored, rollouts: Rollouts, strengths: Tensor, totals: Totals, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """This pass's share of the step's loss, and its named parts."""
    mask = rollouts.mask
    denominator = totals.of_rows(mask, config)
    strengths = strengths.to(scored.logp)
    if config.kind == "clipped":
        loss = clipped_surrogate(
            scored.logp,
            rollouts.logp,
            strengths,
            mask,
            denominator=denominator,
            clip=(config.clip_low, config.clip_high),
            per_rollout=config.ratio == "rollout",
        )
    else:
        shared = float(max(1, totals.pairs)) if config.kind == "ranking" else denominator
        loss = policy_gradient(scored.logp, strengths, mask, denominator=shared)
    parts: dict[str, Tensor] = {}
    if config.kl:
        if scored.reference_logp is None:
            raise UserError(
                f"loss.kl is {config.kl}, but the workload's score() gives no reference_logp. Give one, or set"
                " loss.kl to 0."
            )
        parts["kl"] = kl_to_reference(scored.logp, scored.reference_logp, mask, denominator=denominator)
        loss = loss + config.kl * parts["kl"]
    if scored.entropy is not None:
        parts["entropy"] = masked_sum(scored.entropy, mask, denominator)
        if config.entropy:
            loss = loss - config.entropy * parts["entropy"]
    elif config.entropy:
        raise UserError(
            f"loss.entropy is {config.entropy}, but the workload's score() gives no entropy. Give it, or set"
            " loss.entropy to 0."
        )
    return loss, {"loss": loss} | parts


def cut(rows: int, rows_per_pass: int) -> Iterator[Tensor]:
    """Row numbers, `rows_per_pass` at a time."""
    yield from torch.arange(rows).split(rows_per_pass) if rows else ()


def _count(batch: Rollouts, comparison: Comparison, config: Config, comm: Comm) -> Totals:
    decisions, rollouts = comm.sum(float(batch.mask.sum()), float(len(batch)))
    widest = comm.max(float(batch.mask.sum(1).max()) if len(batch) else 0.0)[0]
    pairs = count_pairs(comparison.rewards, comparison.group_ids) if config.loss.kind == "ranking" else 0
    return Totals(int(decisions), int(rollouts), int(widest), pairs)


def _strengths(
    workload: Workload, rollouts: Rollouts, comparison: Comparison, config: Config, comm: Comm, *, fresh: bool
) -> tuple[Tensor, dict[str, float]]:
    """How hard each of this rank's rows is pushed: its advantage, or its pull in the ranking of its group.

    The ranking depends on the siblings' present log-probabilities, which are the sampled ones before the first update.
    """
    if config.loss.kind != "ranking":
        return comparison.advantages.values[comparison.mine], {}
    logp = rollouts.logp if fresh else _rescore(workload, rollouts, config.rows_per_pass)
    mine = torch.where(rollouts.mask, logp, torch.zeros_like(logp)).sum(1)
    everyone = comm.gather(mine.double())
    pairs = max(1, count_pairs(comparison.rewards, comparison.group_ids))
    loss = pairwise_ranking(everyone, comparison.rewards, comparison.group_ids, denominator=float(pairs))
    pulls = ranking_pulls(everyone, comparison.rewards, comparison.group_ids)
    return pulls[comparison.mine], {"loss": loss.item()}


@torch.no_grad()
def _rescore(workload: Workload, rollouts: Rollouts, rows_per_pass: int) -> Tensor:
    return torch.cat([workload.score(rollouts.select(rows)).logp for rows in cut(len(rollouts), rows_per_pass)])


@torch.no_grad()
def _watch_ratio(scored: Scored, rollouts: Rollouts, config: LossConfig) -> tuple[Tensor, Tensor]:
    ratio = probability_ratio(scored.logp, rollouts.logp, rollouts.mask, per_rollout=config.ratio == "rollout")
    ratio = ratio[rollouts.mask]
    return ratio, (ratio < 1 - config.clip_low) | (ratio > 1 + config.clip_high)


def _apply(state: State, config: Config) -> dict[str, float]:
    """One optimiser step on the summed gradient."""
    rate = learning_rate(config.optimiser, state.updates, config.updates)
    for group in state.optimiser.param_groups:
        group["lr"] = rate
    limit = config.optimiser.max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(state.trainable, float("inf") if limit is None else limit)
    if not norm.isfinite():
        raise UserError(
            f"The gradient of update {state.updates} is not finite (norm {norm.item()}), so it was not applied. Look"
            " for an overflow in the policy, a log-probability of an impossible decision, or a learning rate that is"
            f" too high (optimiser.learning_rate is {config.optimiser.learning_rate})."
        )
    state.optimiser.step()
    state.updates += 1
    if state.ema:
        state.ema.follow(state.policy)
    return {"grad_norm": norm.item(), "learning_rate": rate}
