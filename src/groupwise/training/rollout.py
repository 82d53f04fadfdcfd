"""Further conditions in place of groups whose members all earned the same.

Dynamic sampling: Yu et al., DAPO, arXiv 2503.14476. Each round is a placement of its own, so that what is rolled out
still depends on (seed, step) alone, wherever it runs.
Asking a workload for rewards: all rows at once, or fewer groups at a time where memory is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.core.advantage import compute_advantages
from groupwise.core.errors import UserError
from groupwise.core.groups import Groups
from groupwise.core.placement import Placement, place
from groupwise.core.reward import Rewards
from groupwise.core.types import Advantages, RewardTerms, Rollouts, concatenate_rollouts
from groupwise.training.config import Config
from groupwise.workloads.base import Workload


class Tried(NamedTuple):
    """What was rolled out and what it earned; all but the rollouts in the order of a rank-major gather."""

    placed: Placement
    rollouts: Rollouts
    """Of this rank."""
    group_ids: Tensor
    rewards: Rewards
    decided: Tensor
    """Which rollouts have a decision that is not masked: the others move nothing."""


def refill(tried: Tried, config: Config, try_out: Callable[[Placement], Tried]) -> Tried:
    """Try further rounds until enough groups have spread, or the rounds are used up. Every rank decides alike."""
    wanted, rounds = tried.placed.shape.conditions_per_step, [tried]
    while len(rounds) <= config.refill and sum(map(_groups_with_spread, rounds)) < wanted:
        placed = place(
            tried.placed.shape,
            seed=config.seed,
            step=tried.placed.step,
            round_index=len(rounds),
            rounds=1 + config.refill,
        )
        rounds.append(try_out(placed))
    return join_rounds(rounds)


def keep_first_groups(
    advantages: Advantages, placed: Placement, decided: Tensor | None = None
) -> tuple[Advantages, dict[str, float]]:
    """Train on the first conditions_per_step groups that have spread; say how many groups were dropped.

    A group none of whose rollouts `decided` anything (None: all did) counts as one without spread.
    """
    with_spread = placed.group[advantages.trained if decided is None else advantages.trained & decided].unique()
    kept = with_spread[: placed.shape.conditions_per_step]
    trained = advantages.trained & torch.isin(placed.group, kept)
    values, decisions = advantages.values.clone(), advantages.trained_mask
    values[~trained] = 0
    dropped = {
        "groups_tried": float(advantages.groups),
        "groups_dropped_without_spread": float(advantages.groups - len(with_spread)),
        "groups_dropped_beyond_need": float(len(with_spread) - len(kept)),
    }
    if decisions is not None:
        decisions = decisions & trained[:, None]
    return replace(advantages, values=values, trained=trained, trained_mask=decisions), dropped


def _groups_with_spread(tried: Tried) -> int:
    found = compute_advantages(tried.rewards, tried.group_ids)
    return len(tried.group_ids[found.trained & tried.decided].unique())


def join_rounds(rounds: Sequence[Tried]) -> Tried:
    """All rounds as one: rank after rank, and on each rank round after round."""
    shape = rounds[0].placed.shape

    def join(columns: Sequence[Tensor]) -> Tensor:
        return torch.cat([column.unflatten(0, (shape.ranks, -1)) for column in columns], dim=1).flatten(0, 1)

    placed = [each.placed for each in rounds]
    terms = [each.rewards.terms for each in rounds]
    own = [each.rewards.per_decision for each in rounds if each.rewards.per_decision is not None]
    return Tried(
        replace(
            placed[0],
            group=join([each.group for each in placed]),
            member=join([each.member for each in placed]),
            condition=join([each.condition for each in placed]),
        ),
        concatenate_rollouts([each.rollouts for each in rounds]),
        join([each.group_ids for each in rounds]),
        Rewards(
            join([each.rewards.total for each in rounds]),
            RewardTerms(
                {name: join([each.per_rollout[name] for each in terms]) for name in terms[0].per_rollout},
                per_decision={
                    name: join([each.per_decision[name] for each in terms]) for name in terms[0].per_decision
                },
            ),
            sum(each.rewards.missing for each in rounds),
            join(own) if own else None,
        ),
        join([each.decided for each in rounds]),
    )


def rewards_in_groups(workload: Workload, rollouts: Rollouts, rows: int | None) -> RewardTerms:
    """The workload's terms for every row; siblings are always judged together, at most `rows` rows at a time."""
    if rows is None or rows >= len(rollouts):
        return _checked_rewards(workload, rollouts)
    values: dict[str, Tensor] = {}
    steps: dict[str, Tensor] = {}
    failures: dict[str, str] = {}
    for piece in split_by_group(rollouts.group_ids, rows):
        terms = _checked_rewards(workload, rollouts.select(piece))
        for name, column in terms.per_rollout.items():
            missing = torch.full((len(rollouts),), torch.nan, dtype=torch.float64)
            values.setdefault(name, missing)[piece] = column.cpu().double()
        for name, table in terms.per_decision.items():
            missing = torch.full(rollouts.logp.shape, torch.nan, dtype=torch.float64)
            steps.setdefault(name, missing)[piece] = table.cpu().double()
        failures = {**terms.failures, **failures}
    return RewardTerms(values, failures, steps)


def split_by_group(group_ids: Tensor, rows: int) -> Iterator[Tensor]:
    """The rows of as many groups as make up at most `rows` rows, or of one group if it alone is larger."""
    group_index = Groups.of(group_ids).group_index
    piece: list[int] = []
    for group in group_index.unique().tolist():
        members = (group_index == group).nonzero().flatten().tolist()
        if piece and len(piece) + len(members) > rows:
            yield torch.tensor(piece)
            piece = []
        piece += members
    yield torch.tensor(piece)


def _checked_rewards(workload: Workload, rollouts: Rollouts) -> RewardTerms:
    terms = workload.rewards(rollouts)
    if not isinstance(terms, RewardTerms):
        raise UserError(f"rewards() returned {type(terms).__name__}: it must return groupwise.Terms.")
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
