"""The update: the loss of each pass, the gradient of the step summed over passes and ranks, the optimizer step.

Every denominator is counted over the whole step, so the number of passes and ranks cannot change the gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from groupwise.core.config import LossConfig
from groupwise.core.errors import OutOfMemoryError, UserError
from groupwise.core.io.progress import advance
from groupwise.core.loss import (
    clipped_surrogate,
    count_pairs,
    denominators,
    importance_ratio,
    kl_to_reference,
    masked_sum,
    pairwise_ranking,
    pairwise_weights,
    per_decision,
    policy_gradient,
)
from groupwise.core.transfer import send
from groupwise.core.types import Advantages, Rollouts, Scores, concatenate_scores
from groupwise.dist.comm import Comm
from groupwise.dist.sharding import call_block, exchange_gradients, full, is_sharded, passes_in_step
from groupwise.training.config import Config
from groupwise.training.nonfinite import NonfiniteError, NonfiniteStep, nonfinite_rollouts
from groupwise.training.rollout import Round, rank_slice
from groupwise.training.setup import Setup
from groupwise.training.state import State, learning_rate, reserve_optimizer_memory
from groupwise.workloads.base import Workload


@dataclass(frozen=True)
class StepTotals:
    """Decisions and rollouts that are trained in the whole step, over all ranks: what the loss is divided by."""

    decisions: int
    rollouts: int

    def denominators(self, mask: Tensor, loss: LossConfig) -> Tensor:
        constant = loss.constant or 1.0
        counts = {"decisions": self.decisions, "rollouts": self.rollouts}
        return denominators(mask, loss.denominator, **counts, constant=constant)


def loss_of_pass(
    scores: Scores, rollouts: Rollouts, row_weights: Tensor, totals: StepTotals, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """This pass's part of the step's loss, and its named terms."""
    return _loss(scores, rollouts, row_weights, totals.denominators(rollouts.mask, config), config)


def _loss(
    scores: Scores, rollouts: Rollouts, row_weights: Tensor, denominator: Tensor, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    mask = rollouts.mask
    loss = _surrogate(scores, rollouts, row_weights.to(scores.logp), denominator, config)
    parts: dict[str, Tensor] = {}
    if config.kl:
        parts["kl"] = _kl(scores, mask, denominator, config)
        loss = loss + config.kl * parts["kl"]
    if config.entropy and scores.entropy is None:
        raise UserError(_missing_score_field("entropy", config.entropy, "entropy"))
    if scores.entropy is not None:
        parts["entropy"] = masked_sum(scores.entropy, mask, denominator)
        loss = loss - config.entropy * parts["entropy"]
    return loss, {"loss": loss} | parts


def backward_in_parts(
    parts: Sequence[Callable[[], Scores]],
    rollouts: Rollouts,
    row_weights: Tensor,
    totals: StepTotals,
    config: LossConfig,
) -> tuple[Scores, dict[str, Tensor]]:
    """Add the gradient of a pass, part after part of its decisions: the graph of one part is held at a time.

    The loss is a sum over decisions. A ratio per rollout needs the log-probs of all its decisions first: they are
    computed once without a graph, and each part gets the gradient with respect to its own. Returned with the scores
    are the named terms of the loss, one number a part, still on the device.
    """
    denominator = totals.denominators(rollouts.mask, config)
    if len(parts) > 1 and config.ratio == "rollout":
        return _backward_of_values(parts, rollouts, row_weights, denominator, config)
    detached, terms, done = [], list[dict[str, Tensor]](), 0
    for score in parts:
        scores = score()
        part = slice(done, done + scores.logp.shape[1])
        done = part.stop
        weights = row_weights[:, part] if row_weights.ndim == 2 else row_weights
        loss, named = _loss(scores, rollouts.decisions(part), weights, denominator, config)
        loss.backward()
        detached.append(_detached(scores))
        terms.append({name: value.detach() for name, value in named.items()})
    return concatenate_scores(detached), {name: torch.stack([part[name] for part in terms]) for name in terms[0]}


def _backward_of_values(
    parts: Sequence[Callable[[], Scores]],
    rollouts: Rollouts,
    row_weights: Tensor,
    denominator: Tensor,
    config: LossConfig,
) -> tuple[Scores, dict[str, Tensor]]:
    with torch.no_grad():
        scores = concatenate_scores([score() for score in parts])
    leaves = {name: column.requires_grad_() for name, column in scores.by_name().items()}
    loss, terms = _loss(Scores(**leaves), rollouts, row_weights, denominator, config)
    loss.backward()
    done = 0
    for score in parts:
        columns = score().by_name()
        part = slice(done, done + columns["logp"].shape[1])
        done = part.stop
        used = [name for name, column in columns.items() if column.requires_grad and leaves[name].grad is not None]
        gradients = [cast(Tensor, leaves[name].grad)[:, part] for name in used]
        torch.autograd.backward([columns[name] for name in used], gradients)
    return _detached(scores), {name: value.detach()[None] for name, value in terms.items()}


def _detached(scores: Scores) -> Scores:
    return Scores(**{name: column.detach() for name, column in scores.by_name().items()})


@torch.no_grad()
def ratio_statistics(scores: Scores, rollouts: Rollouts, row_weights: Tensor, config: LossConfig) -> dict[str, Tensor]:
    """Over the decisions: the sum of their ratios, how many are clipped, the highest ratio and the lowest."""
    per_rollout = config.ratio == "rollout"
    ratio = importance_ratio(scores.logp, rollouts.logp, rollouts.mask, per_rollout=per_rollout)
    gains = per_decision(row_weights.to(ratio))
    clipped = ((ratio > 1 + config.clip_high) & (gains > 0)) | ((ratio < 1 - config.clip_low) & (gains < 0))
    mask = rollouts.mask
    statistics = {
        "ratio_mean": ratio.masked_fill(~mask, 0).sum(),
        "clip_fraction": (clipped & mask).sum(),
        "ratio_max": ratio.masked_fill(~mask, -math.inf).max(),
        "ratio_min": ratio.masked_fill(~mask, math.inf).min(),
    }
    return {name: value.to(ratio.dtype)[None] for name, value in statistics.items()}


def _kl(scores: Scores, mask: Tensor, denominator: Tensor, config: LossConfig) -> Tensor:
    """In closed form where the workload knows it, else estimated from the log-probabilities."""
    if scores.kl is not None:
        return masked_sum(scores.kl, mask, denominator)
    if scores.reference_logp is None:
        raise UserError(_missing_score_field("kl", config.kl, "reference_logp"))
    return kl_to_reference(scores.logp, scores.reference_logp, mask, denominator=denominator)


def _surrogate(
    scores: Scores, rollouts: Rollouts, row_weights: Tensor, denominator: Tensor, config: LossConfig
) -> Tensor:
    if config.kind == "clipped":
        return clipped_surrogate(
            scores.logp,
            rollouts.logp,
            row_weights,
            rollouts.mask,
            denominator=denominator,
            clip=(config.clip_low, config.clip_high),
            per_rollout=config.ratio == "rollout",
        )
    # The weights of a ranking are divided by the number of pairs already.
    shared = 1.0 if config.kind == "ranking" else denominator
    return policy_gradient(scores.logp, row_weights, rollouts.mask, denominator=shared)


def _missing_score_field(name: str, weight: float, field: str) -> str:
    return f"loss.{name} is {weight}, but the workload's score() gives no {field}. Give it, or set loss.{name} to 0."


@dataclass(frozen=True)
class TrainingBatch:
    """This rank's rows that contribute a gradient: a reward, a group with spread, an unmasked decision."""

    rollouts: Rollouts
    """All of this rank's: a copy of those to train would take as much memory again."""
    rows: Tensor
    """Which of them are trained."""
    totals: StepTotals
    idle: Rollouts
    """A row of this rank without a decision to train, for passes that only keep a sharded rank in step."""

    def passes(self, workload: Workload, rows_per_pass: int, comm: Comm) -> list[Tensor]:
        """The row indices of each pass among those to train, as the workload splits them.

        When sharded, all ranks have equally many passes: those with fewer rows add idle ones, without indices.
        """
        trained = self.rollouts.select(self.rows)
        passes = list(workload.passes(trained, rows_per_pass)) if len(self.rows) else []
        del trained
        all_rows = torch.cat(passes).sort().values if passes else torch.arange(0)
        if not torch.equal(all_rows, torch.arange(len(self.rows))):
            raise UserError(
                f"passes() of {type(workload).__name__} returned {len(all_rows)} rows for {len(self.rows)}: every row"
                " must be in exactly one pass."
            )
        if is_sharded(workload.policy):
            comm.proceed()
            most = int(comm.max(float(len(passes)))[0])
            passes += [torch.arange(0)] * (most - len(passes))
        return passes

    def select(self, rows: Tensor) -> Rollouts:
        """The rollouts of one pass."""
        return self.rollouts.select(self.rows[rows]) if len(rows) else self.idle


def update(setup: Setup, batch: Round, advantages: Advantages) -> dict[str, float]:
    """Update the policy `updates_per_step` times; not at all where no group has spread.

    Nothing is applied where the rollouts, the loss or the gradient are not finite: `setup.nonfinite` then says why.
    What is retried after an out-of-memory error has changed no weight yet, so no update is ever undone.
    """
    retry = setup.recovery.retry_smaller
    setup.nonfinite.problem = nonfinite_rollouts(batch, setup.config, setup.comm)
    if setup.nonfinite.problem:
        return {"trained_rollouts": 0.0}
    training = retry("update", select_rows, setup, batch, advantages)
    if not training.totals.decisions:
        return {"trained_rollouts": 0.0}
    metrics: dict[str, float] = {}
    for update_index in range(setup.config.optimizer.updates_per_step):
        first = update_index == 0
        row_weights, extra = retry("update", _row_weights, setup, training, batch, advantages, first_update=first)
        metrics = retry("update", accumulate_gradient, setup, training, row_weights) | extra
        try:
            _refuse_nonfinite_loss(metrics["loss"], setup.state.step)
            metrics |= _apply(setup.state, setup.config, update_index, setup.comm)
        except NonfiniteError as error:
            rank_rows = retry("update", _nonfinite_rows, setup, training, row_weights)
            rows = setup.comm.gather(torch.isin(torch.arange(len(batch.rollouts)), rank_rows)).nonzero().flatten()
            setup.state.optimizer.zero_grad(set_to_none=True)
            setup.nonfinite.problem = NonfiniteStep(str(error), rows)
            return metrics | {"trained_rollouts": 0.0}
    return metrics | {"trained_rollouts": float(training.totals.rollouts)}


def select_rows(setup: Setup, batch: Round, advantages: Advantages) -> TrainingBatch:
    """This rank's rows to train, and the totals over all ranks."""
    comm, rollouts, rank_rows = setup.comm, batch.rollouts, rank_slice(batch, setup.comm)
    if advantages.trained_mask is not None:
        trained_mask = advantages.trained_mask[rank_rows].to(rollouts.mask.device)
        rollouts = replace(rollouts, mask=rollouts.mask & trained_mask)
    mask = rollouts.mask.cpu()
    rows = (advantages.trained[rank_rows] & mask.any(1)).nonzero().flatten()
    with comm.fail_together("Selecting the rows to train"):
        idle = rollouts.select(torch.arange(1))
        idle = replace(idle, mask=torch.zeros_like(idle.mask))
    decisions, count = comm.sum(float(mask[rows].sum()), float(len(rows)))
    return TrainingBatch(rollouts, rows, StepTotals(int(decisions), int(count)), idle)


def accumulate_gradient(setup: Setup, training: TrainingBatch, row_weights: Tensor) -> dict[str, float]:
    """The gradient of the step's loss, summed over passes and ranks. Returns its metrics, averaged over the step."""
    config, comm, state, workload = setup.config, setup.comm, setup.state, setup.workload
    state.optimizer.zero_grad(set_to_none=True)
    sums = dict.fromkeys(("loss", "kl", "entropy", "ratio_mean", "clip_fraction"), 0.0)
    highest, lowest = -math.inf, math.inf
    loss_config = replace(config.loss, entropy=config.loss.entropy_at(state.step / config.steps), entropy_end=None)
    working = setup.work.measure("update")
    with comm.fail_together(f"score() of {type(workload).__name__}"), passes_in_step(state.policy), working:
        passes = training.passes(workload, state.row_limits["rows_per_pass"], comm)
        for index, rows in enumerate(passes):
            part = training.select(rows)
            weights = _on_device_of(part, _weights_of(row_weights, rows))
            exchange_gradients(state.policy, config.shard_exchange == "pass" or index == len(passes) - 1)
            parts = [partial(call_block, state.policy, score) for score in workload.score_parts(part)]
            scores, terms = backward_in_parts(parts, part, weights, training.totals, loss_config)
            advance()
            if not len(rows):
                continue
            values = _read_together(terms | ratio_statistics(scores, part, weights, config.loss))
            for name, numbers in values.items():
                if name in sums:
                    share = training.totals.decisions if name in ("ratio_mean", "clip_fraction") else 1
                    sums[name] += sum(numbers) / share
            highest, lowest = max(highest, *values["ratio_max"]), min(lowest, *values["ratio_min"])
    comm.sum_gradients(state.trainable)
    with comm.fail_together("Reserving memory for the optimizer"):
        reserve_optimizer_memory(state)
    metrics = dict(zip(sums, comm.sum(*sums.values()), strict=True))
    highest, negative_lowest = comm.max(highest, -lowest)
    return _drop_inactive_metrics(metrics, config) | {"ratio_max": highest, "ratio_min": -negative_lowest}


def _weights_of(row_weights: Tensor, rows: Tensor) -> Tensor:
    """Of the rows of a pass; zero for the row of an idle one."""
    return row_weights[rows] if len(rows) else row_weights.new_zeros(1, *row_weights.shape[1:])


def _on_device_of(part: Rollouts, row_weights: Tensor) -> Tensor:
    """Row weights where the rows are; off the CPU in their dtype, as not all devices have float64."""
    device = part.logp.device
    return row_weights if device.type == "cpu" else send(row_weights.to(part.logp.dtype), device)


def _read_together(columns: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Named vectors of numbers in one copy to the host: each copy waits for the device."""
    lengths = [len(column) for column in columns.values()]
    numbers = torch.cat([column.to(next(iter(columns.values()))) for column in columns.values()]).tolist()
    ends = itertools.accumulate(lengths)
    return {name: numbers[end - length : end] for name, length, end in zip(columns, lengths, ends, strict=True)}


def _drop_inactive_metrics(metrics: dict[str, float], config: Config) -> dict[str, float]:
    """Without what is switched off: a zero would look like a measurement."""
    inactive = set() if config.loss.kl else {"kl"}
    inactive |= set() if metrics["entropy"] else {"entropy"}
    inactive |= set() if config.loss.kind == "clipped" else {"clip_fraction"}
    return {name: value for name, value in metrics.items() if name not in inactive}


def _row_weights(
    setup: Setup, training: TrainingBatch, batch: Round, advantages: Advantages, *, first_update: bool
) -> tuple[Tensor, dict[str, float]]:
    """The weight of each row's log-probability in the loss: its advantage, or its weight in the ranking of its group.

    The ranking depends on the current log-probabilities of the whole group; before the first update these are the
    sampled ones. Rows that are not trained make no pair.
    """
    comm, rank_rows = setup.comm, rank_slice(batch, setup.comm)
    if setup.config.loss.kind != "ranking":
        return advantages.values[rank_rows][training.rows], {}
    rank_logp = torch.full((len(batch.rollouts),), torch.nan, dtype=torch.float64)
    rank_logp[training.rows] = _logp_of_rows(setup, training, first_update=first_update)
    all_logp = comm.gather(rank_logp)
    rewards = batch.rewards.total.double().masked_fill(all_logp.isnan(), torch.nan)
    logp, pairs = all_logp.nan_to_num(nan=0.0), max(1, count_pairs(rewards, batch.group_ids))
    loss = pairwise_ranking(logp, rewards, batch.group_ids, denominator=float(pairs))
    weights = pairwise_weights(logp, rewards, batch.group_ids) / pairs
    return weights[rank_rows][training.rows], {"ranking_loss": loss.item()}


@torch.no_grad()
def _logp_of_rows(setup: Setup, training: TrainingBatch, *, first_update: bool) -> Tensor:
    """Log-probability of each row as a whole, under the current weights."""
    rows_on_device = send(training.rows, training.rollouts.logp.device)
    workload, logp = setup.workload, training.rollouts.logp[rows_on_device]
    if not first_update:
        with setup.comm.fail_together(f"score() of {type(workload).__name__}"), passes_in_step(workload.policy):
            for rows in training.passes(workload, setup.state.row_limits["rows_per_pass"], setup.comm):
                scores = call_block(workload.policy, workload.score, training.select(rows))
                if len(rows):
                    logp[rows] = scores.logp.to(logp)
    return logp.masked_fill(~training.rollouts.mask[rows_on_device], 0).sum(1).cpu().double()


def _refuse_nonfinite_loss(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise NonfiniteError(
            f"The loss of step {step} is not finite ({loss}), so it was not applied. Look for a log-probability of an"
            " impossible decision, of the policy or of its reference, and for an overflow in a ratio."
        )


def _nonfinite_rows(setup: Setup, training: TrainingBatch, row_weights: Tensor) -> Tensor:
    """This rank's rows whose own log-probability, loss or gradient is not finite: first by pass, then row by row.

    When sharded by pass only, and without gradients: those are summed over the ranks.
    """
    state, workload, config = setup.state, setup.workload, setup.config.loss
    sharded, rows_per_pass = is_sharded(state.policy), state.row_limits["rows_per_pass"]

    def is_finite(part: Rollouts, weights: Tensor) -> bool:
        state.optimizer.zero_grad(set_to_none=True)
        parts = [partial(call_block, state.policy, score) for score in workload.score_parts(part)]
        scores, terms = backward_in_parts(parts, part, _on_device_of(part, weights), training.totals, config)
        if not (scores.logp.isfinite() | ~part.mask).all() or not terms["loss"].isfinite().all():
            return False
        gradients = [weight.grad for weight in state.trainable if weight.grad is not None and not sharded]
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    offending: list[Tensor] = []
    with setup.comm.fail_together(f"score() of {type(workload).__name__}"), passes_in_step(state.policy):
        for rows in training.passes(workload, rows_per_pass, setup.comm):
            if is_finite(training.select(rows), _weights_of(row_weights, rows)):
                continue
            alone = [
                row for row in rows if not sharded and not is_finite(training.select(row[None]), row_weights[row[None]])
            ]
            offending.append(torch.stack(alone) if alone else rows)
    return training.rows[torch.cat(offending)] if offending else training.rows[:0]


def _apply(state: State, config: Config, update_index: int, comm: Comm) -> dict[str, float]:
    """One optimizer step on the summed gradient."""
    updates = state.step * config.optimizer.updates_per_step + update_index
    rate = learning_rate(config.optimizer, updates, config.updates)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    limit = config.optimizer.max_grad_norm
    norm = full(torch.nn.utils.clip_grad_norm_(state.trainable, float("inf") if limit is None else limit)).item()
    if not math.isfinite(norm):
        raise NonfiniteError(
            f"The gradient of step {state.step} is not finite (norm {norm}), so it was not applied. Look for an"
            " overflow in the policy, a log-probability of an impossible decision, or a learning rate that is too high"
            f" (optimizer.learning_rate is {config.optimizer.learning_rate})."
        )
    state.updates += 1  # first: an update that fails midway has changed some weights and must not be saved as complete
    _step_together(state, comm)
    if not _all_finite(state.trainable):
        raise UserError(
            f"The update of step {state.step} made weights that are not finite. Lower optimizer.learning_rate (it was"
            f" {rate:g}) and resume from the last checkpoint."
        )
    if state.ema:
        state.ema.update(state.policy)
    return {"grad_norm": norm, "learning_rate": rate}


def _step_together(state: State, comm: Comm) -> None:
    """The optimizer's step. Its memory was reserved, but what else runs on the machine may have taken it since."""
    try:
        with comm.fail_together("The optimizer"):
            state.optimizer.step()
    except OutOfMemoryError as error:
        raise UserError(
            f"Out of memory in the middle of the update of step {state.step}, which some weights have had and some have"
            f" not: {error} They are not saved; --resume continues from the newest checkpoint. Leave more memory free,"
            " or save more often (--checkpoint-every)."
        ) from None


def _all_finite(weights: list[torch.nn.Parameter]) -> bool:
    """A finite norm proves it in one pass without extra memory. Any other norm may have overflowed: check each."""
    if full(torch.nn.utils.get_total_norm(weights)).isfinite():
        return True
    return all(bool(full(weight.isfinite().all())) for weight in weights)
