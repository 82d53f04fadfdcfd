"""Further conditions in place of groups whose members all earned the same.

Dynamic sampling: Yu et al., DAPO, arXiv 2503.14476. Each round is a placement of its own, so that what is rolled out
still depends on (seed, step) alone, wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.core.advantage import compare
from groupwise.core.placement import Placement, place
from groupwise.core.reward import Rewards
from groupwise.core.types import Advantages, Rollouts, Terms, concatenate
from groupwise.train.config import Config


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
            tried.placed.shape, seed=config.seed, step=tried.placed.step, nth=len(rounds), rounds=1 + config.refill
        )
        rounds.append(try_out(placed))
    return _joined(rounds)


def keep_first(
    advantages: Advantages, placed: Placement, decided: Tensor | None = None
) -> tuple[Advantages, dict[str, float]]:
    """Train on the first conditions_per_step groups that have spread; say how many groups were dropped.

    A group none of whose rollouts `decided` anything (None: all did) counts as one without spread.
    """
    with_spread = placed.group[advantages.trained if decided is None else advantages.trained & decided].unique()
    kept = with_spread[: placed.shape.conditions_per_step]
    trained = advantages.trained & torch.isin(placed.group, kept)
    values, decisions = advantages.values.clone(), advantages.trained_decisions
    values[~trained] = 0
    dropped = {
        "groups_tried": float(advantages.groups),
        "groups_dropped_without_spread": float(advantages.groups - len(with_spread)),
        "groups_dropped_beyond_need": float(len(with_spread) - len(kept)),
    }
    if decisions is not None:
        decisions = decisions & trained[:, None]
    return replace(advantages, values=values, trained=trained, trained_decisions=decisions), dropped


def _groups_with_spread(tried: Tried) -> int:
    found = compare(tried.rewards, tried.group_ids)
    return len(tried.group_ids[found.trained & tried.decided].unique())


def _joined(rounds: Sequence[Tried]) -> Tried:
    """All rounds as one: rank after rank, and on each rank round after round."""
    shape = rounds[0].placed.shape

    def join(columns: Sequence[Tensor]) -> Tensor:
        return torch.cat([column.unflatten(0, (shape.ranks, -1)) for column in columns], dim=1).flatten(0, 1)

    placed = [each.placed for each in rounds]
    terms = [each.rewards.terms for each in rounds]
    own = [each.rewards.by_decision for each in rounds if each.rewards.by_decision is not None]
    return Tried(
        replace(
            placed[0],
            group=join([each.group for each in placed]),
            member=join([each.member for each in placed]),
            condition=join([each.condition for each in placed]),
        ),
        concatenate([each.rollouts for each in rounds]),
        join([each.group_ids for each in rounds]),
        Rewards(
            join([each.rewards.total for each in rounds]),
            Terms(
                {name: join([each.values[name] for each in terms]) for name in terms[0].values},
                steps={name: join([each.steps[name] for each in terms]) for name in terms[0].steps},
            ),
            sum(each.rewards.missing for each in rounds),
            join(own) if own else None,
        ),
        join([each.decided for each in rounds]),
    )
