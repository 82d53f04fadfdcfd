"""One step's rollouts and advantages into new weights, in passes whose number cannot change the result.
The loss of one pass, as its share of the loss of the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from groupwise.core.config import LossConfig
from groupwise.core.errors import UserError
from groupwise.core.loss import (
    clipped_surrogate,
    count_pairs,
    denominators,
    importance_ratio,
    kl_to_reference,
    masked_sum,
    pairwise_ranking,
    per_decision,
    policy_gradient,
    ranking_pulls,
)
from groupwise.core.types import Advantages, Rollouts, Scores
from groupwise.dist.comm import Comm
from groupwise.memory.recovery import Retry, no_retry
from groupwise.training.config import Config
from groupwise.training.state import State, learning_rate, reserve_optimizer_memory
from groupwise.workloads.base import Workload


@dataclass(frozen=True)
class StepTotals:
    """Counts over the whole step, all ranks: the only denominators there are."""

    decisions: int
    rollouts: int

    def of_rows(self, mask: Tensor, loss: LossConfig) -> Tensor:
        constant = loss.constant or 1.0
        counts = {"decisions": self.decisions, "rollouts": self.rollouts}
        return denominators(mask.cpu(), loss.denominator, **counts, constant=constant).to(mask.device)


def loss_of_pass(
    scored: Scores, rollouts: Rollouts, strengths: Tensor, totals: StepTotals, config: LossConfig
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
        raise UserError(_missing_score_field("entropy", config.entropy, "entropy"))
    if scored.entropy is not None:
        parts["entropy"] = masked_sum(scored.entropy, mask, denominator)
        loss = loss - config.entropy * parts["entropy"]
    return loss, {"loss": loss} | parts


@torch.no_grad()
def ratio_statistics(
    scored: Scores, rollouts: Rollouts, strengths: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """The ratio of every decision, and whether clipping holds it back."""
    per_rollout = config.ratio == "rollout"
    ratio = importance_ratio(scored.logp, rollouts.logp, rollouts.mask, per_rollout=per_rollout)
    gains = per_decision(strengths.to(ratio))
    held = ((ratio > 1 + config.clip_high) & (gains > 0)) | ((ratio < 1 - config.clip_low) & (gains < 0))
    return ratio[rollouts.mask], held[rollouts.mask]


def _kl(scored: Scores, mask: Tensor, denominator: Tensor, config: LossConfig) -> Tensor:
    """In closed form where the workload knows it, else estimated from the log-probabilities."""
    if scored.kl is not None:
        return masked_sum(scored.kl, mask, denominator)
    if scored.reference_logp is None:
        raise UserError(_missing_score_field("kl", config.kl, "reference_logp"))
    return kl_to_reference(scored.logp, scored.reference_logp, mask, denominator=denominator)


def _surrogate(
    scored: Scores, rollouts: Rollouts, strengths: Tensor, denominator: Tensor, config: LossConfig
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


def _missing_score_field(name: str, weight: float, field: str) -> str:
    return f"loss.{name} is {weight}, but the workload's score() gives no {field}. Give it, or set loss.{name} to 0."


@dataclass(frozen=True)
class Comparison:
    """The whole step's groups and rewards, and this rank's share of them."""

    group_ids: Tensor
    rewards: Tensor
    advantages: Advantages
    mine: slice


@dataclass(frozen=True)
class TrainingBatch:
    """This rank's rows that can move something: their group has spread, their reward is there, they decided."""

    rollouts: Rollouts
    rows: Tensor
    """Which of the rank's rows they are."""
    totals: StepTotals

    def passes(self, workload: Workload, rows_per_pass: int) -> Iterator[tuple[Rollouts, Tensor]]:
        """Cuts of the batch as the workload wants them, and the numbers of their rows in it."""
        cuts = list(workload.passes(self.rollouts, rows_per_pass)) if len(self.rows) else []
        every = torch.cat(cuts).sort().values if cuts else torch.arange(0)
        if not torch.equal(every, torch.arange(len(self.rows))):
            raise UserError(
                f"passes() of {type(workload).__name__} returned {len(every)} rows for {len(self.rows)}: every row must"
                " be in exactly one pass."
            )
        for rows in cuts:
            yield self.rollouts.select(rows), rows


def update(
    workload: Workload,
    rollouts: Rollouts,
    comparison: Comparison,
    *,
    state: State,
    config: Config,
    comm: Comm,
    again: Retry = no_retry,
) -> dict[str, float]:
    """Change the policy `updates_per_rollout` times; nothing at all where no group has spread.

    `again` repeats what ran out of memory, in smaller pieces. Nothing that it repeats has changed a weight: what was
    updated already is not undone.
    """
    batch = again("update", _batch, rollouts, comparison, comm)
    if not batch.totals.decisions:
        return {"trained_rollouts": 0.0}
    metrics: dict[str, float] = {}
    for nth in range(config.optimizer.updates_per_rollout):
        given: dict[str, Any] = {"state": state, "config": config, "comm": comm}
        strengths, extra = again("update", _row_weights, workload, batch, comparison, **given, fresh=nth == 0)
        metrics = again("update", accumulate_gradient, workload, batch, strengths, **given) | extra
        metrics |= _apply(state, config, nth)
    return metrics | {"trained_rollouts": float(batch.totals.rollouts)}


def accumulate_gradient(
    workload: Workload, batch: TrainingBatch, strengths: Tensor, *, state: State, config: Config, comm: Comm
) -> dict[str, float]:
    """The gradient of the step's loss, summed over passes and ranks. Returns its metrics, averaged over the step."""
    state.optimizer.zero_grad(set_to_none=True)
    sums = dict.fromkeys(("loss", "kl", "entropy", "ratio_mean", "clip_share"), 0.0)
    highest, lowest = -math.inf, math.inf
    now = replace(config.loss, entropy=config.loss.entropy_at(state.step / config.steps), entropy_end=None)
    with comm.fail_together(f"score() of {type(workload).__name__}"):
        for part, rows in batch.passes(workload, state.cut.rows_per_pass):
            scored = workload.score(part)
            loss, parts = loss_of_pass(scored, part, strengths[rows], batch.totals, now)
            loss.backward()
            ratio, held = ratio_statistics(scored, part, strengths[rows], config.loss)
            parts["ratio_mean"] = ratio.sum() / batch.totals.decisions
            parts["clip_share"] = held.sum() / batch.totals.decisions
            for name, value in parts.items():
                sums[name] += value.item()
            highest, lowest = max(highest, ratio.max().item()), min(lowest, ratio.min().item())
    comm.sum_gradients(state.trainable)
    with comm.fail_together("Making room for the optimizer"):
        reserve_optimizer_memory(state)
    metrics = dict(zip(sums, comm.sum(*sums.values()), strict=True))
    highest, negative_lowest = comm.max(highest, -lowest)
    return _drop_inactive_metrics(metrics, config) | {"ratio_max": highest, "ratio_min": -negative_lowest}


def _drop_inactive_metrics(metrics: dict[str, float], config: Config) -> dict[str, float]:
    """Without what is switched off: a zero would look like a measurement."""
    idle = set() if config.loss.kl else {"kl"}
    idle |= set() if metrics["entropy"] else {"entropy"}
    idle |= set() if config.loss.kind == "clipped" else {"clip_share"}
    return {name: value for name, value in metrics.items() if name not in idle}


def _batch(rollouts: Rollouts, comparison: Comparison, comm: Comm) -> TrainingBatch:
    if comparison.advantages.trained_mask is not None:
        own = comparison.advantages.trained_mask[comparison.mine]
        rollouts = replace(rollouts, mask=rollouts.mask & own.to(rollouts.mask.device))
    trained = comparison.advantages.trained[comparison.mine] & rollouts.mask.any(1).cpu()
    rows = trained.nonzero().flatten()
    with comm.fail_together("Selecting the rows to train"):
        kept = rollouts.select(rows)
    decisions, count = comm.sum(float(kept.mask.sum()), float(len(kept)))
    return TrainingBatch(kept, rows, StepTotals(int(decisions), int(count)))


def _row_weights(
    workload: Workload,
    batch: TrainingBatch,
    comparison: Comparison,
    *,
    state: State,
    config: Config,
    comm: Comm,
    fresh: bool,
) -> tuple[Tensor, dict[str, float]]:
    """How hard each row of the batch is pushed: its advantage, or its pull in the ranking of its group.

    The ranking depends on the siblings' present log-probabilities, which are the sampled ones before the first update.
    Rows outside the batch make no pair: their group has no spread, their reward is missing, or they decided nothing.
    """
    if config.loss.kind != "ranking":
        return comparison.advantages.values[comparison.mine][batch.rows], {}
    mine = torch.full((comparison.mine.stop - comparison.mine.start,), torch.nan, dtype=torch.float64)
    mine[batch.rows] = _logp_of_rows(workload, batch, state.cut.rows_per_pass, comm, fresh=fresh)
    everyone = comm.gather(mine)
    rewards = comparison.rewards.double().masked_fill(everyone.isnan(), torch.nan)
    logp, pairs = everyone.nan_to_num(nan=0.0), max(1, count_pairs(rewards, comparison.group_ids))
    loss = pairwise_ranking(logp, rewards, comparison.group_ids, denominator=float(pairs))
    pulls = ranking_pulls(logp, rewards, comparison.group_ids) / pairs
    return pulls[comparison.mine][batch.rows], {"ranking_loss": loss.item()}


@torch.no_grad()
def _logp_of_rows(workload: Workload, batch: TrainingBatch, rows_per_pass: int, comm: Comm, *, fresh: bool) -> Tensor:
    """Log-probability of each row as a whole, under the present weights."""
    logp = batch.rollouts.logp.clone()
    if not fresh:
        with comm.fail_together(f"score() of {type(workload).__name__}"):
            for part, rows in batch.passes(workload, rows_per_pass):
                logp[rows] = workload.score(part).logp.to(logp)
    return logp.masked_fill(~batch.rollouts.mask, 0).sum(1).cpu().double()


def _apply(state: State, config: Config, nth: int) -> dict[str, float]:
    """One optimizer step on the summed gradient."""
    done = state.step * config.optimizer.updates_per_rollout + nth
    rate = learning_rate(config.optimizer, done, config.updates)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    limit = config.optimizer.max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(state.trainable, float("inf") if limit is None else limit)
    if not norm.isfinite():
        raise UserError(
            f"The gradient of step {state.step} is not finite (norm {norm.item()}), so it was not applied. Look for an"
            " overflow in the policy, a log-probability of an impossible decision, or a learning rate that is too high"
            f" (optimizer.learning_rate is {config.optimizer.learning_rate})."
        )
    state.updates += 1  # first: a step that breaks off has changed some weights, and must not be saved as complete
    state.optimizer.step()
    if not _all_finite(state.trainable):
        raise UserError(
            f"The update of step {state.step} made weights that are not finite. Lower optimizer.learning_rate (it was"
            f" {rate:g}) and resume from the last checkpoint."
        )
    if state.ema:
        state.ema.follow(state.policy)
    return {"grad_norm": norm.item(), "learning_rate": rate}


def _all_finite(weights: list[torch.nn.Parameter]) -> bool:
    """A finite norm says so in one pass that takes no memory. Any other may have overflowed: then each is looked at."""
    if torch.nn.utils.get_total_norm(weights).isfinite():
        return True
    return all(bool(weight.isfinite().all()) for weight in weights)
