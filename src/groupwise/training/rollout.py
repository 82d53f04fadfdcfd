"""One round of a step: rollouts, their group ids and their rewards; and further rounds for groups without spread.

Further rounds are dynamic sampling: Yu et al., DAPO, arXiv 2503.14476. Each round has a placement of its own, so that
what is rolled out depends on (seed, step) alone, wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from groupwise.core.advantage import compute_advantages
from groupwise.core.errors import UserError
from groupwise.core.groups import Groups, check_groups
from groupwise.core.placement import Placement
from groupwise.core.randomness import random_bits
from groupwise.core.reward import Rewards, too_many_missing
from groupwise.core.types import Advantages, RewardTerms, Rollouts, concatenate_rollouts
from groupwise.dist.comm import Comm
from groupwise.dist.sharding import rollout_weights
from groupwise.training.config import Config
from groupwise.training.setup import Setup
from groupwise.workloads.base import Workload


@dataclass(frozen=True)
class Round:
    """Rollouts and their rewards. All but the rollouts are of the whole step, in the order of a rank-major gather."""

    placement: Placement
    rollouts: Rollouts
    """Of this rank."""
    group_ids: Tensor
    rewards: Rewards


@torch.no_grad()
def generate_rollouts(setup: Setup, placement: Placement) -> Rollouts:
    """This rank's rollouts. Torch's own generator is seeded by (seed, step), for policies that use it all the same."""
    comm, workload = setup.comm, setup.workload
    torch.manual_seed(int(random_bits(placement.seed, placement.step)))
    rows = replace(placement.rows_of(comm.rank), rows_per_pass=setup.state.row_limits["rows_per_pass"])
    with comm.fail_together(f"rollout() of {type(workload).__name__}"), rollout_weights(workload.policy):
        with setup.timer.measure_work("rollout"):
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


def gather_group_ids(rollouts: Rollouts, placement: Placement, comm: Comm) -> Tensor:
    """The group ids of all ranks, checked against the placement."""
    group_ids = comm.gather(rollouts.group_ids)
    check_groups(placement.group, group_ids)
    return group_ids


def gather_has_decisions(rollouts: Rollouts, comm: Comm) -> Tensor:
    """Which rollouts of all ranks have an unmasked decision: the others contribute no gradient."""
    return comm.gather(rollouts.mask.any(1).cpu())


def compute_rewards(setup: Setup, rollouts: Rollouts) -> RewardTerms:
    """The reward terms of all ranks."""
    comm, workload = setup.comm, setup.workload
    working = setup.timer.measure_work("reward")
    with comm.fail_together(f"rewards() of {type(workload).__name__}"), rollout_weights(workload.policy), working:
        terms = rewards_in_groups(workload, rollouts, setup.state.row_limits.get("reward_rows"))
    failures: dict[str, str] = {}
    if comm.any(bool(terms.failures)):
        for rank_failures in comm.gather_objects([dict(terms.failures)]):
            failures = rank_failures | failures
    return RewardTerms(
        {name: comm.gather(column.cpu().double()) for name, column in terms.per_rollout.items()},
        failures,
        {name: comm.gather(table.cpu().double()) for name, table in terms.per_decision.items()},
    )


def rewards_in_groups(workload: Workload, rollouts: Rollouts, rows: int | None) -> RewardTerms:
    """The workload's reward terms for every row, in calls of at most `rows` rows; a group is never split."""
    if rows is None or rows >= len(rollouts):
        return _checked_rewards(workload, rollouts)
    per_rollout: dict[str, Tensor] = {}
    per_decision: dict[str, Tensor] = {}
    failures: dict[str, str] = {}
    for indices in split_by_group(rollouts.group_ids, rows):
        terms = _checked_rewards(workload, rollouts.select(indices))
        for name, column in terms.per_rollout.items():
            missing = torch.full((len(rollouts),), torch.nan, dtype=torch.float64)
            per_rollout.setdefault(name, missing)[indices] = column.cpu().double()
        for name, table in terms.per_decision.items():
            missing = torch.full(rollouts.logp.shape, torch.nan, dtype=torch.float64)
            per_decision.setdefault(name, missing)[indices] = table.cpu().double()
        failures = {**terms.failures, **failures}
    return RewardTerms(per_rollout, failures, per_decision)


def split_by_group(group_ids: Tensor, rows: int) -> Iterator[Tensor]:
    """Row indices of as many groups as have at most `rows` rows together, or of one group that is larger alone."""
    group_index = Groups.of(group_ids).group_index
    indices: list[int] = []
    for group in group_index.unique().tolist():
        members = (group_index == group).nonzero().flatten().tolist()
        if indices and len(indices) + len(members) > rows:
            yield torch.tensor(indices)
            indices = []
        indices += members
    yield torch.tensor(indices)


def _checked_rewards(workload: Workload, rollouts: Rollouts) -> RewardTerms:
    terms = workload.rewards(rollouts)
    if not isinstance(terms, RewardTerms):
        raise UserError(f"rewards() returned {type(terms).__name__}: it must return groupwise.RewardTerms.")
    for name, column in terms.per_rollout.items():
        if column.shape != (len(rollouts),):
            raise UserError(
                f"Reward '{name}' has shape {tuple(column.shape)} for {len(rollouts)} rows: it must be one number a"
                " row."
            )
    for name, table in terms.per_decision.items():
        if table.shape != rollouts.logp.shape:
            raise UserError(
                f"Reward '{name}' of decisions has shape {tuple(table.shape)} where the rollouts have"
                f" {tuple(rollouts.logp.shape)}: it must be one number a decision."
            )
    return terms


def needs_round(rounds: Sequence[Round], config: Config, comm: Comm) -> bool:
    """Whether a step needs another round: the first, and up to `refill` more while too few groups have spread."""
    if not rounds:
        return True
    if len(rounds) > config.refill or too_many_missing(rounds[-1].rewards, config.reward):
        return False
    return sum(groups_with_spread(batch, comm) for batch in rounds) < config.conditions_per_step


def groups_with_spread(batch: Round, comm: Comm) -> int:
    """Groups of a round that can be trained on: rewards differ, and some decision is not masked."""
    advantages = compute_advantages(batch.rewards, batch.group_ids)
    return len(batch.group_ids[advantages.trained & gather_has_decisions(batch.rollouts, comm)].unique())


def join_rounds(rounds: Sequence[Round]) -> Round:
    """All rounds as one: rank after rank, and within a rank round after round."""
    if len(rounds) == 1:
        return rounds[0]
    first, placements = rounds[0], [batch.placement for batch in rounds]

    def join(columns: Sequence[Tensor]) -> Tensor:
        by_rank = [column.unflatten(0, (first.placement.shape.ranks, -1)) for column in columns]
        return torch.cat(by_rank, dim=1).flatten(0, 1)

    return Round(
        replace(
            first.placement,
            group=join([placement.group for placement in placements]),
            member=join([placement.member for placement in placements]),
            condition=join([placement.condition for placement in placements]),
        ),
        concatenate_rollouts([batch.rollouts for batch in rounds]),
        join([batch.group_ids for batch in rounds]),
        _join_rewards([batch.rewards for batch in rounds], join),
    )


def _join_rewards(rounds: Sequence[Rewards], join: Callable[[Sequence[Tensor]], Tensor]) -> Rewards:
    def join_terms(terms: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: join([columns[name] for columns in terms]) for name in terms[0]}

    per_decision = [rewards.per_decision for rewards in rounds if rewards.per_decision is not None]
    return Rewards(
        join([rewards.total for rewards in rounds]),
        RewardTerms(
            join_terms([rewards.terms.per_rollout for rewards in rounds]),
            {name: reason for rewards in rounds for name, reason in rewards.terms.failures.items()},
            per_decision=join_terms([rewards.terms.per_decision for rewards in rounds]),
        ),
        join(per_decision) if per_decision else None,
    )


def keep_first_groups(
    advantages: Advantages, batch: Round, config: Config, comm: Comm
) -> tuple[Advantages, dict[str, float]]:
    """With refill: train on the first conditions_per_step groups that have spread, and count the others.

    A group none of whose rollouts has an unmasked decision counts as one without spread.
    """
    if not config.refill:
        return advantages, {}
    groups = batch.placement.group
    with_spread = groups[advantages.trained & gather_has_decisions(batch.rollouts, comm)].unique()
    kept = with_spread[: config.conditions_per_step]
    trained = advantages.trained & torch.isin(groups, kept)
    values, trained_mask = advantages.values.clone(), advantages.trained_mask
    values[~trained] = 0
    if trained_mask is not None:
        trained_mask = trained_mask & trained[:, None]
    return replace(advantages, values=values, trained=trained, trained_mask=trained_mask), {
        "groups_sampled": float(advantages.groups),
        "groups_dropped_without_spread": float(advantages.groups - len(with_spread)),
        "groups_dropped_surplus": float(len(with_spread) - len(kept)),
    }


def rank_slice(batch: Round, comm: Comm) -> slice:
    """This rank's rows among those of the whole step."""
    rows = len(batch.rollouts)
    return slice(comm.rank * rows, (comm.rank + 1) * rows)
