"""The only loop. Read `train_step` first: one line a stage, whatever is being trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from groupwise.core.advantage import compute_advantages
from groupwise.core.errors import UserError
from groupwise.core.groups import check_groups
from groupwise.core.placement import Placement, place
from groupwise.core.randomness import random_bits
from groupwise.core.reward import Rewards, term_statistics, weigh
from groupwise.core.shape import StepShape
from groupwise.core.types import Advantages, RewardTerms, Rollouts
from groupwise.dist.comm import Comm
from groupwise.latency.meter import StageTimer
from groupwise.memory.measure import MemoryUsage, PeakMemory
from groupwise.memory.recovery import Recovery, Retry, RowLimits
from groupwise.training.config import Config
from groupwise.training.rollout import Tried, keep_first_groups, refill, rewards_in_groups
from groupwise.training.state import State
from groupwise.training.update import Comparison, update
from groupwise.workloads.base import Workload


@dataclass(frozen=True)
class StepResult:
    """What one step did: its metrics, and some of its rollouts for people to look at."""

    step: int
    metrics: Mapping[str, float]
    samples: list[dict[str, Any]]
    memory: MemoryUsage
    """Of the fullest rank."""


def training_steps(
    workload: Workload, *, state: State, shape: StepShape, config: Config, comm: Comm, recovery: Recovery | None = None
) -> Iterator[StepResult]:
    """Train step after step, from where the state stands to the end."""
    recovery = recovery or Recovery(workload, state.cut, shape, warn=_ignore_warning)
    for _ in range(state.step, config.steps):
        yield recovery.whole(train_step, workload, state, shape, config, comm, recovery)


def train_step(
    workload: Workload, state: State, shape: StepShape, config: Config, comm: Comm, recovery: Recovery
) -> StepResult:
    """From the placement of the state's next step to its update."""
    step, again = state.step, recovery.attempt  # in smaller pieces, whenever memory runs out
    laps, memory = StageTimer(), PeakMemory(comm.device)
    state.optimizer.zero_grad(set_to_none=True)  # the rollout has the memory of the last gradient
    placed = place(shape, seed=config.seed, step=step, rounds=1 + config.refill)
    rollouts = again("rollout", generate_rollouts, workload, placed, comm, state.cut)
    group_ids = gather_group_ids(rollouts, placed, comm)
    laps.lap("rollout_s")
    terms = again("reward", compute_rewards, workload, rollouts, comm, state.cut)
    rewards = weigh(terms, config.reward)
    laps.lap("reward_s")
    dropped: dict[str, float] = {}
    if config.refill:
        more = partial(try_out, workload, state=state, config=config, comm=comm, again=again)
        first = Tried(placed, rollouts, group_ids, rewards, gather_has_decisions(rollouts, comm))
        placed, rollouts, group_ids, rewards, decided = refill(first, config, more)
        laps.lap("refill_s")
    advantages = compute_advantages(rewards, group_ids, config.advantage)
    if config.refill:
        advantages, dropped = keep_first_groups(advantages, placed, decided)
    comparison = Comparison(group_ids, rewards.total, advantages, rank_slice(comm, shape, placed.rounds))
    metrics = update(workload, rollouts, comparison, state=state, config=config, comm=comm, again=again)
    laps.lap("update_s")
    metrics = workload_metrics(workload, rollouts, comparison, comm) | dropped | metrics
    state.step = step + 1
    samples = describe_rollouts(workload, rollouts, placed, rewards, advantages, comm, config.run.samples_per_step)
    metrics = summarize_step(rewards, advantages, metrics, laps, comm) | recovery.step_done()
    return StepResult(step, metrics, samples, memory.over_ranks(comm))


def _ignore_warning(text: str) -> None:
    """Where nobody listens, metrics.jsonl still tells of every shortage."""


def try_out(workload: Workload, placed: Placement, *, state: State, config: Config, comm: Comm, again: Retry) -> Tried:
    """One further round of a step."""
    rollouts = again("rollout", generate_rollouts, workload, placed, comm, state.cut)
    group_ids = gather_group_ids(rollouts, placed, comm)
    terms = again("reward", compute_rewards, workload, rollouts, comm, state.cut)
    return Tried(placed, rollouts, group_ids, weigh(terms, config.reward), gather_has_decisions(rollouts, comm))


@torch.no_grad()
def generate_rollouts(workload: Workload, placed: Placement, comm: Comm, cut: RowLimits | None = None) -> Rollouts:
    """This rank's rollouts. Torch's own generator is set from (seed, step), for policies that use it all the same."""
    torch.manual_seed(int(random_bits(placed.seed, placed.step)))
    rows = placed.rows_of(comm.rank)
    rows = replace(rows, rows_per_pass=cut.rows_per_pass) if cut else rows
    with comm.fail_together(f"rollout() of {type(workload).__name__}"):
        rollouts = workload.rollout(rows)
        check_rollouts(rollouts, len(rows))
    return rollouts


def check_rollouts(rollouts: Rollouts, rows: int) -> None:
    """Refuse rollouts that the rest of the step could not use."""
    if not isinstance(rollouts, Rollouts):
        raise UserError(f"rollout() returned {type(rollouts).__name__}: it must return groupwise.Rollouts.")
    logp, mask, ids = rollouts.logp, rollouts.mask, rollouts.group_ids
    if logp.ndim != 2 or mask.shape != logp.shape or mask.dtype != torch.bool or ids.dtype != torch.int64:
        raise UserError(
            f"rollout() returned logp {tuple(logp.shape)}, mask {tuple(mask.shape)} of {mask.dtype} and group_ids of"
            f" {ids.dtype}: logp and mask must be [rows, decisions], the mask of torch.bool, the ids of torch.int64."
        )
    counts = {"group_ids": len(ids), "logp": len(logp), **{name: len(c) for name, c in rollouts.data.items()}}
    for name, count in counts.items():
        if count != rows:
            raise UserError(
                f"rollout() returned {count} rows of {name} where {rows} were placed: it must return one entry for"
                " every row, in their order."
            )
    broken = int((~logp.isfinite() & mask).any(1).sum())
    if broken:
        raise UserError(
            f"{broken} of {rows} rollouts have a log-probability that is not finite. Either the policy's weights are no"
            " longer finite (lower optimizer.learning_rate), or a decision was taken that the policy gives no chance."
        )


def gather_group_ids(rollouts: Rollouts, placed: Placement, comm: Comm) -> Tensor:
    """The group ids of the whole step in seat order, checked against what was placed."""
    group_ids = comm.gather(rollouts.group_ids)
    check_groups(placed.group, group_ids)
    return group_ids


def gather_has_decisions(rollouts: Rollouts, comm: Comm) -> Tensor:
    """Which rollouts of the whole step have a decision that is not masked, in seat order."""
    return comm.gather(rollouts.mask.any(1).cpu())


def compute_rewards(workload: Workload, rollouts: Rollouts, comm: Comm, cut: RowLimits | None = None) -> RewardTerms:
    """The reward terms of the whole step in seat order."""
    with comm.fail_together(f"rewards() of {type(workload).__name__}"):
        terms = rewards_in_groups(workload, rollouts, cut.reward_rows if cut else None)
    values = {name: comm.gather(column.cpu().double()) for name, column in terms.per_rollout.items()}
    failures: dict[str, str] = {}
    if comm.any(bool(terms.failures)):
        for found in comm.gather_objects([dict(terms.failures)]):
            failures = found | failures
    return RewardTerms(
        values, failures, {name: comm.gather(table.cpu().double()) for name, table in terms.per_decision.items()}
    )


def workload_metrics(workload: Workload, rollouts: Rollouts, comparison: Comparison, comm: Comm) -> dict[str, float]:
    """The workload's own metrics: means over the rows of all ranks that have the number."""
    with comm.fail_together(f"step_metrics() of {type(workload.reporter).__name__}"):
        found = workload.reporter.step_metrics(rollouts, comparison.advantages.values[comparison.mine])
        for name, column in found.items():
            if column.shape != (len(rollouts),):
                raise UserError(
                    f"step_metrics() returned '{name}' of shape {tuple(column.shape)} for {len(rollouts)} rows: it"
                    " must be one number a row."
                )
    return {name: comm.gather(column.cpu().double()).nanmean().item() for name, column in found.items()}


def rank_slice(comm: Comm, shape: StepShape, rounds: int = 1) -> slice:
    """This rank's seats."""
    seats = shape.rollouts_per_rank * rounds
    return slice(comm.rank * seats, (comm.rank + 1) * seats)


def describe_rollouts(
    workload: Workload,
    rollouts: Rollouts,
    placed: Placement,
    rewards: Rewards,
    advantages: Advantages,
    comm: Comm,
    wanted: int,
) -> list[dict[str, Any]]:
    """The step's first rollouts, group by group: the same ones wherever they ran."""
    if not wanted:
        return []
    nth = (placed.group - placed.group.min()) * placed.shape.group_size + placed.member
    mine = rank_slice(comm, placed.shape, placed.rounds)
    rows = (nth[mine] < wanted).nonzero().flatten()
    seats = rows + mine.start
    with comm.fail_together(f"describe_rollouts() of {type(workload.reporter).__name__}"):
        shown = workload.reporter.describe_rollouts(rollouts.select(rows)) if len(rows) else []
    entries = [
        {
            **details,
            "step": placed.step,
            "group": int(placed.group[seat]),
            "member": int(placed.member[seat]),
            "condition": int(placed.condition[seat]),
            "reward": _number(rewards.total[seat]),
            "rewards": {name: _number(column[seat]) for name, column in rewards.terms.per_rollout.items()},
            "advantage": _plain(advantages.values[seat]),
        }
        for seat, details in zip(seats.tolist(), shown, strict=True)
    ]
    return sorted(comm.gather_objects(entries), key=lambda entry: (entry["group"], entry["member"]))


def summarize_step(
    rewards: Rewards, advantages: Advantages, metrics: Mapping[str, float], laps: StageTimer, comm: Comm
) -> dict[str, float]:
    """One flat record of the step; times are those of the slowest rank."""
    present = rewards.total[~rewards.total.isnan()]
    seconds = comm.max(*laps.seconds.values())
    return {
        "reward": present.mean().item() if len(present) else float("nan"),
        "reward_std": present.std(correction=0).item() if len(present) else float("nan"),
        **term_statistics(rewards.terms),
        "missing_rewards": float(rewards.missing),
        "zero_spread_share": advantages.zero_spread_groups / advantages.groups,
        **metrics,
        **dict(zip(laps.seconds, seconds, strict=True)),
    }


def _plain(advantage: Tensor) -> float | list[float | None] | None:
    return [_number(each) for each in advantage] if advantage.ndim else _number(advantage)


def _number(value: Tensor) -> float | None:
    """A JSON number; null for a missing one."""
    return None if value.isnan() else value.item()
