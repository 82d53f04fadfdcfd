"""The only loop. Read `train_step` first: one line a stage, whatever is being trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from groupwise.core.advantage import compare
from groupwise.core.errors import UserError
from groupwise.core.groups import check_groups
from groupwise.core.placement import Placement, place
from groupwise.core.randomness import random_bits
from groupwise.core.reward import Rewards, term_statistics, weigh
from groupwise.core.shape import Shape
from groupwise.core.types import Advantages, Rollouts, Terms
from groupwise.dist.comm import Comm
from groupwise.latency.meter import Laps
from groupwise.memory.measure import Memory, Peak
from groupwise.memory.recovery import Attempt, Cut, Recovery
from groupwise.training.config import Config
from groupwise.training.rollout import Tried, judge_in_pieces, keep_first, refill
from groupwise.training.state import State
from groupwise.training.update import Comparison, update
from groupwise.workloads.base import Workload


@dataclass(frozen=True)
class Step:
    """What one step did: its figures, and some of its rollouts for people to look at."""

    step: int
    figures: Mapping[str, float]
    samples: list[dict[str, Any]]
    memory: Memory
    """Of the fullest rank."""


def training_steps(
    workload: Workload, *, state: State, shape: Shape, config: Config, comm: Comm, recovery: Recovery | None = None
) -> Iterator[Step]:
    """Train step after step, from where the state stands to the end."""
    recovery = recovery or Recovery(workload, state.cut, shape, warn=_unheard)
    for _ in range(state.step, config.steps):
        yield recovery.whole(train_step, workload, state, shape, config, comm, recovery)


def train_step(workload: Workload, state: State, shape: Shape, config: Config, comm: Comm, recovery: Recovery) -> Step:
    """From the placement of the state's next step to its update."""
    step, again = state.step, recovery.attempt  # in smaller pieces, whenever memory runs out
    laps, memory = Laps(), Peak(comm.device)
    state.optimiser.zero_grad(set_to_none=True)  # the rollout has the memory of the last gradient
    placed = place(shape, seed=config.seed, step=step, rounds=1 + config.refill)
    rollouts = again("rollout", rollout, workload, placed, comm, state.cut)
    group_ids = gather_ids(rollouts, placed, comm)
    laps.lap("rollout_s")
    terms = again("reward", gather_rewards, workload, rollouts, comm, state.cut)
    rewards = weigh(terms, config.reward)
    laps.lap("reward_s")
    dropped: dict[str, float] = {}
    if config.refill:
        more = partial(try_out, workload, state=state, config=config, comm=comm, again=again)
        first = Tried(placed, rollouts, group_ids, rewards, gather_decided(rollouts, comm))
        placed, rollouts, group_ids, rewards, decided = refill(first, config, more)
        laps.lap("refill_s")
    advantages = compare(rewards, group_ids, config.advantage)
    if config.refill:
        advantages, dropped = keep_first(advantages, placed, decided)
    comparison = Comparison(group_ids, rewards.total, advantages, share(comm, shape, placed.rounds))
    figures = update(workload, rollouts, comparison, state=state, config=config, comm=comm, again=again)
    laps.lap("update_s")
    figures = measure(workload, rollouts, comparison, comm) | dropped | figures
    state.step = step + 1
    samples = describe(workload, rollouts, placed, rewards, advantages, comm, config.run.samples_per_step)
    figures = summarise(rewards, advantages, figures, laps, comm) | recovery.step_done()
    return Step(step, figures, samples, memory.fullest(comm))


def _unheard(text: str) -> None:
    """Where nobody listens, metrics.jsonl still tells of every shortage."""


def try_out(
    workload: Workload, placed: Placement, *, state: State, config: Config, comm: Comm, again: Attempt
) -> Tried:
    """One further round of a step."""
    rollouts = again("rollout", rollout, workload, placed, comm, state.cut)
    group_ids = gather_ids(rollouts, placed, comm)
    terms = again("reward", gather_rewards, workload, rollouts, comm, state.cut)
    return Tried(placed, rollouts, group_ids, weigh(terms, config.reward), gather_decided(rollouts, comm))


@torch.no_grad()
def rollout(workload: Workload, placed: Placement, comm: Comm, cut: Cut | None = None) -> Rollouts:
    """This rank's rollouts. Torch's own generator is set from (seed, step), for policies that use it all the same."""
    torch.manual_seed(int(random_bits(placed.seed, placed.step)))
    rows = placed.of(comm.rank)
    rows = replace(rows, rows_per_pass=cut.rows_per_pass) if cut else rows
    with comm.together(f"rollout() of {type(workload).__name__}"):
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
            " longer finite (lower optimiser.learning_rate), or a decision was taken that the policy gives no chance."
        )


def gather_ids(rollouts: Rollouts, placed: Placement, comm: Comm) -> Tensor:
    """The group ids of the whole step in seat order, checked against what was placed."""
    group_ids = comm.gather(rollouts.group_ids)
    check_groups(placed.group, group_ids)
    return group_ids


def gather_decided(rollouts: Rollouts, comm: Comm) -> Tensor:
    """Which rollouts of the whole step have a decision that is not masked, in seat order."""
    return comm.gather(rollouts.mask.any(1).cpu())


def gather_rewards(workload: Workload, rollouts: Rollouts, comm: Comm, cut: Cut | None = None) -> Terms:
    """The reward terms of the whole step in seat order."""
    with comm.together(f"rewards() of {type(workload).__name__}"):
        terms = judge_in_pieces(workload, rollouts, cut.reward_rows if cut else None)
    values = {name: comm.gather(column.cpu().double()) for name, column in terms.values.items()}
    failures: dict[str, str] = {}
    if comm.any(bool(terms.failures)):
        for found in comm.gather_objects([dict(terms.failures)]):
            failures = found | failures
    return Terms(values, failures, {name: comm.gather(table.cpu().double()) for name, table in terms.steps.items()})


def measure(workload: Workload, rollouts: Rollouts, comparison: Comparison, comm: Comm) -> dict[str, float]:
    """The workload's own figures: means over the rows of all ranks that have the number."""
    with comm.together(f"measures() of {type(workload).__name__}"):
        found = workload.measures(rollouts, comparison.advantages.values[comparison.mine])
        for name, column in found.items():
            if column.shape != (len(rollouts),):
                raise UserError(
                    f"measures() returned '{name}' of shape {tuple(column.shape)} for {len(rollouts)} rows: it must be"
                    " one number a row."
                )
    return {name: comm.gather(column.cpu().double()).nanmean().item() for name, column in found.items()}


def share(comm: Comm, shape: Shape, rounds: int = 1) -> slice:
    """This rank's seats."""
    seats = shape.rollouts_per_rank * rounds
    return slice(comm.rank * seats, (comm.rank + 1) * seats)


def describe(
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
    mine = share(comm, placed.shape, placed.rounds)
    rows = (nth[mine] < wanted).nonzero().flatten()
    seats = rows + mine.start
    with comm.together(f"describe() of {type(workload).__name__}"):
        shown = workload.describe(rollouts.select(rows)) if len(rows) else []
    entries = [
        {
            **details,
            "step": placed.step,
            "group": int(placed.group[seat]),
            "member": int(placed.member[seat]),
            "condition": int(placed.condition[seat]),
            "reward": _number(rewards.total[seat]),
            "rewards": {name: _number(column[seat]) for name, column in rewards.terms.values.items()},
            "advantage": _plain(advantages.values[seat]),
        }
        for seat, details in zip(seats.tolist(), shown, strict=True)
    ]
    return sorted(comm.gather_objects(entries), key=lambda entry: (entry["group"], entry["member"]))


def summarise(
    rewards: Rewards, advantages: Advantages, figures: Mapping[str, float], laps: Laps, comm: Comm
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
        **figures,
        **dict(zip(laps.seconds, seconds, strict=True)),
    }


def _plain(advantage: Tensor) -> float | list[float | None] | None:
    return [_number(each) for each in advantage] if advantage.ndim else _number(advantage)


def _number(value: Tensor) -> float | None:
    """A JSON number; null for a missing one."""
    return None if value.isnan() else value.item()
