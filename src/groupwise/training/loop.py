"""The only training loop. Read `train_step` first: one line a stage, whatever is being trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from groupwise.core.advantage import compute_advantages
from groupwise.core.balance import idle_share
from groupwise.core.errors import UserError
from groupwise.core.placement import place as place_step
from groupwise.core.reward import term_statistics
from groupwise.core.reward import weigh_present as weigh
from groupwise.core.types import Advantages
from groupwise.dist.devices import host_syncs
from groupwise.memory.measure import MemoryUsage, PeakMemory
from groupwise.training.nonfinite import rows_of_groups
from groupwise.training.rollout import (
    Round,
    compute_rewards,
    gather_group_ids,
    generate_rollouts,
    join_rounds,
    keep_first_groups,
    needs_round,
    rank_slice,
)
from groupwise.training.setup import Setup
from groupwise.training.update import update


@dataclass(frozen=True)
class StepResult:
    """The metrics of one step, and some of its rollouts for people to read."""

    step: int
    metrics: Mapping[str, float]
    samples: list[dict[str, Any]]
    memory: MemoryUsage
    """Of the rank with the highest peak."""
    skipped: str = ""
    """Why the policy was not updated, where a number was not finite."""
    skipped_samples: list[dict[str, Any]] = field(default_factory=list)
    """The rollouts of the groups concerned."""


def training_steps(setup: Setup) -> Iterator[StepResult]:
    """Train step after step, from the state's next step to the last."""
    while setup.state.step < setup.config.steps:
        yield train_step(setup)


def train_step(setup: Setup) -> StepResult:
    """One step of GRPO. `retry` repeats a stage with smaller batches after an out-of-memory error: same result."""
    config, comm, state, retry = setup.config, setup.comm, setup.state, setup.recovery.retry_smaller
    timer, memory, syncs = setup.timer, PeakMemory(comm.device), host_syncs(comm.device)
    timer.start()
    place = partial(place_step, costs=setup.workload.expected_costs)
    state.optimizer.zero_grad(set_to_none=True)  # the rollout may use the gradients' memory
    rounds: list[Round] = []
    while needs_round(rounds, config, comm):  # one; with config.refill more, while too few groups have spread
        placement = place(
            setup.shape, seed=config.seed, step=state.step, round_index=len(rounds), rounds=1 + config.refill
        )
        rollouts = retry("rollout", generate_rollouts, setup, placement)
        group_ids = gather_group_ids(rollouts, placement, comm)
        timer.end("rollout")
        rewards = weigh(retry("reward", compute_rewards, setup, rollouts), config.reward)
        timer.end("reward")
        rounds.append(Round(placement, rollouts, group_ids, rewards))
    batch = join_rounds(rounds)
    advantages = compute_advantages(batch.rewards, batch.group_ids, config.advantage)
    advantages, refill_metrics = keep_first_groups(advantages, batch, config, comm)
    metrics = update(setup, batch, advantages)
    timer.end("update")
    skipped_samples = describe_nonfinite(setup, batch, advantages)
    setup.nonfinite.decide(skipped_samples)
    metrics = workload_metrics(setup, batch, advantages) | refill_metrics | metrics
    samples = describe_rollouts(setup, batch, advantages)
    metrics = summarize_step(batch, advantages, metrics, setup) | setup.recovery.step_metrics()
    metrics |= setup.nonfinite.step_metrics()
    if syncs is not None:
        metrics["host_syncs"] = float((host_syncs(comm.device) or 0) - syncs)
    state.step += 1
    skipped = setup.nonfinite.problem.reason if setup.nonfinite.problem else ""
    return StepResult(state.step - 1, metrics, samples, memory.over_ranks(comm), skipped, skipped_samples)


def workload_metrics(setup: Setup, batch: Round, advantages: Advantages) -> dict[str, float]:
    """The reporter's metrics: means over the rows of all ranks that have the number."""
    comm, reporter, rollouts = setup.comm, setup.workload.reporter, batch.rollouts
    with comm.fail_together(f"step_metrics() of {type(reporter).__name__}"):
        columns = reporter.step_metrics(rollouts, advantages.values[rank_slice(batch, comm)])
        for name, column in columns.items():
            if column.shape != (len(rollouts),):
                raise UserError(
                    f"step_metrics() returned '{name}' of shape {tuple(column.shape)} for {len(rollouts)} rows: it"
                    " must be one number a row."
                )
    return {name: comm.gather(column.cpu().double()).nanmean().item() for name, column in columns.items()}


def describe_rollouts(setup: Setup, batch: Round, advantages: Advantages) -> list[dict[str, Any]]:
    """The step's first rollouts, group by group: the same ones wherever they ran."""
    if not setup.config.run.samples_per_step:
        return []
    comm, placement = setup.comm, batch.placement
    rank_rows = rank_slice(batch, comm)
    rollout_index = (placement.group - placement.group.min()) * placement.shape.group_size + placement.member
    rows = (rollout_index[rank_rows] < setup.config.run.samples_per_step).nonzero().flatten()
    return _describe(setup, batch, advantages, rows)


def describe_nonfinite(setup: Setup, batch: Round, advantages: Advantages) -> list[dict[str, Any]]:
    """The rollouts of the first groups in which something is not finite, with their log-probabilities."""
    if setup.nonfinite.problem is None:
        return []
    rank_rows = rank_slice(batch, setup.comm)
    rows = rows_of_groups(setup.nonfinite.problem, batch) - rank_rows.start
    rows = rows[(rows >= 0) & (rows < len(batch.rollouts))]
    return _describe(setup, batch, advantages, rows, with_logp=True)


def _describe(
    setup: Setup, batch: Round, advantages: Advantages, rows: Tensor, *, with_logp: bool = False
) -> list[dict[str, Any]]:
    """Some of this rank's rollouts, together with those of the other ranks."""
    comm, reporter, placement = setup.comm, setup.workload.reporter, batch.placement
    start = rank_slice(batch, comm).start
    with comm.fail_together(f"describe_rollouts() of {type(reporter).__name__}"):
        descriptions = reporter.describe_rollouts(batch.rollouts.select(rows)) if len(rows) else []
    entries = [
        {
            **description,
            "step": placement.step,
            "group": int(placement.group[position]),
            "member": int(placement.member[position]),
            "condition": int(placement.condition[position]),
            "reward": _number(batch.rewards.total[position]),
            "rewards": {name: _number(column[position]) for name, column in batch.rewards.terms.per_rollout.items()},
            "advantage": _numbers(advantages.values[position]),
            **({"logp": _logp_of_row(batch, position - start)} if with_logp else {}),
        }
        for position, description in zip((rows + start).tolist(), descriptions, strict=True)
    ]
    return sorted(comm.gather_objects(entries), key=lambda entry: (entry["group"], entry["member"]))


def summarize_step(
    batch: Round, advantages: Advantages, metrics: Mapping[str, float], setup: Setup
) -> dict[str, float]:
    """One flat record of the step; times are those of the slowest rank."""
    rewards = batch.rewards
    present = rewards.total[~rewards.total.isnan()]
    timer, stages = setup.timer, len(setup.timer.total)
    times = setup.comm.gather(torch.tensor([[*timer.work.values(), *timer.total.values()]], dtype=torch.float64))
    slowest = times[:, stages:].max(0).values.tolist()
    return {
        "reward": present.mean().item() if len(present) else float("nan"),
        "reward_std": present.std(correction=0).item() if len(present) else float("nan"),
        **term_statistics(rewards.terms),
        "missing_rewards": float(rewards.missing),
        "zero_spread_share": advantages.zero_spread_groups / advantages.groups,
        **metrics,
        **({"idle_share": idle_share(times[:, :stages])} if setup.comm.ranks > 1 else {}),
        **{f"{stage}_s": seconds for stage, seconds in zip(timer.total, slowest, strict=True)},
    }


def _logp_of_row(batch: Round, row: int) -> list[float | str]:
    """Of its unmasked decisions; as text where JSON has no number for it."""
    logp = batch.rollouts.logp[row][batch.rollouts.mask[row]].tolist()
    return [value if math.isfinite(value) else str(value) for value in logp]


def _numbers(advantage: Tensor) -> float | list[float | None] | None:
    return [_number(value) for value in advantage] if advantage.ndim else _number(advantage)


def _number(value: Tensor) -> float | None:
    """A JSON number; null for a missing one."""
    return None if value.isnan() else value.item()
