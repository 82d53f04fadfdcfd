"""What a flow workload is about: a model, conditions to train on and to hold out, and how clips are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from groupwise.workloads.flow.conditions import Condition
from groupwise.workloads.flow.models.base import FlowModel
from groupwise.workloads.judge import RewardFunction

Draw = Callable[[Sequence[Condition], Tensor], Callable[[Path], None]]
"""(conditions, their clips) -> writes a picture of them to a path."""


@dataclass(frozen=True)
class FlowTask:
    model: FlowModel
    conditions: Sequence[Condition]
    held_out: Sequence[Condition]
    rewards: Mapping[str, RewardFunction]
    """By name: `reward(prompts, completions, **columns)`, TRL's signature. A completion is a clip [channels, frames,
    height, width] or a picture [channels, height, width] in -1..1; columns are `cameras`, `sources`, `names`, and the
    conditions' own."""
    step_rewards: Mapping[str, RewardFunction] = field(default_factory=dict)
    """The same for each drawn step: a completion is what the model expects the clip to be after that step."""
    measured: Mapping[str, RewardFunction] = field(default_factory=dict)
    """Figures of held-out clips that are not rewards, such as errors with a unit."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """What the task's held-out reward is made of; without them each term stands alone."""
    pictures: Mapping[str, Draw] = field(default_factory=dict)
    pictured: int = 4
    """How many of the held-out conditions are drawn."""
    notes: Sequence[str] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    """What checkpoints hold besides the weights."""
