"""Clips into reward terms, per clip and per denoising step."""

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
    """All functions on all clips, with the parts of their conditions as columns."""
    names = dict.fromkeys(name for condition in conditions for name in condition.columns)
    columns: dict[str, list[Any]] = {name: [condition.columns.get(name) for condition in conditions] for name in names}
    columns |= {
        "cameras": [condition.camera for condition in conditions],
        "sources": [condition.source for condition in conditions],
        "names": [condition.name for condition in conditions],
    }
    return call_rewards(functions, [condition.prompt for condition in conditions], list(clips), **columns)


def step_rewards(
    functions: Mapping[str, RewardFunction],
    conditions: Sequence[Condition],
    predicted: Sequence[Tensor],
    terms: RewardTerms,
) -> RewardTerms:
    """The terms of finished clips, with those of every step, whose predicted clips are scored alike."""
    by_step = [clip_rewards(functions, conditions, clips) for clips in predicted]
    per_decision = {name: torch.stack([step.per_rollout[name] for step in by_step], dim=1) for name in functions}
    failures = {name: reason for step in by_step for name, reason in step.failures.items()}
    return RewardTerms(terms.per_rollout, {**terms.failures, **failures}, per_decision)


def weighted_sum(terms: RewardTerms, weights: Mapping[str, float]) -> Float[Tensor, " rows"]:
    """The weighted sum of the terms that have a weight."""
    return torch.stack([weight * terms.per_rollout[name] for name, weight in weights.items()] or [torch.zeros(1)]).sum(
        0
    )
