"""Clips into named rewards. A reward that fails is missing, not zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.types import RewardTerms
from groupwise.rewards.call import RewardFunction, call_rewards
from groupwise.workloads.flow.task import Condition


def clip_rewards(
    functions: Mapping[str, RewardFunction], conditions: Sequence[Condition], clips: Float[Tensor, "rows ..."]
) -> RewardTerms:
    """All functions on all clips, with what their conditions are made of as columns."""
    names = dict.fromkeys(name for condition in conditions for name in condition.reward_columns)
    columns: dict[str, list[Any]] = {name: [each.reward_columns.get(name) for each in conditions] for name in names}
    columns |= {
        "cameras": [each.camera for each in conditions],
        "sources": [each.source_clip for each in conditions],
        "names": [each.name for each in conditions],
    }
    return call_rewards(functions, [each.prompt for each in conditions], list(clips), **columns)


def step_rewards(
    functions: Mapping[str, RewardFunction],
    conditions: Sequence[Condition],
    expected: Sequence[Tensor],
    terms: RewardTerms,
) -> RewardTerms:
    """The terms, and with them those of single steps: each step's expected clips are judged like finished ones."""
    judged = [clip_rewards(functions, conditions, clips) for clips in expected]
    steps = {name: torch.stack([each.per_rollout[name] for each in judged], dim=1) for name in functions}
    failures = {name: reason for each in judged for name, reason in each.failures.items()}
    return RewardTerms(terms.per_rollout, {**terms.failures, **failures}, steps)


def weighted_sum(terms: RewardTerms, weights: Mapping[str, float]) -> Float[Tensor, " rows"]:
    """The weighted sum of the terms that have a weight here."""
    return torch.stack([weight * terms.per_rollout[name] for name, weight in weights.items()] or [torch.zeros(1)]).sum(
        0
    )
