"""Clips into reward terms, per clip and per denoising step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.types import RewardTerms
from groupwise.rewards.call import RewardFunction, call_rewards
from groupwise.workloads.flow.data.clips import ClipFile, to_float
from groupwise.workloads.flow.task import Condition

_KEPT_BYTES = 512 << 20


class SourceClips(Sequence[Tensor | None]):
    """The source clip of each row in -1..1, read from its file when it is asked for: most rewards do not look at it.

    Rows of a group have the same clip, so the last ones are kept, as bytes.
    """

    def __init__(self, conditions: Sequence[Condition]):
        self._conditions = conditions
        self._kept: dict[ClipFile, Tensor] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._conditions)

    @overload
    def __getitem__(self, index: int) -> Tensor | None: ...
    @overload
    def __getitem__(self, index: slice) -> SourceClips: ...
    def __getitem__(self, index: int | slice) -> Tensor | SourceClips | None:
        if isinstance(index, slice):
            return SourceClips(self._conditions[index])
        condition = self._conditions[index]
        return condition.source_clip if condition.source_file is None else to_float(self._read(condition.source_file))

    def _read(self, file: ClipFile) -> Tensor:
        clip = self._kept.pop(file, None)
        self._kept[file] = clip = file.read() if clip is None else clip
        while len(self._kept) > 1 and sum(kept.numel() for kept in self._kept.values()) > _KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        return clip


def clip_rewards(
    functions: Mapping[str, RewardFunction], conditions: Sequence[Condition], clips: Float[Tensor, "rows ..."]
) -> RewardTerms:
    """All functions on all clips, with the parts of their conditions as columns."""
    names = dict.fromkeys(name for condition in conditions for name in condition.reward_columns)
    columns: dict[str, Sequence[Any]] = {
        name: [condition.reward_columns.get(name) for condition in conditions] for name in names
    }
    columns |= {
        "cameras": [condition.camera for condition in conditions],
        "sources": SourceClips(conditions),
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
