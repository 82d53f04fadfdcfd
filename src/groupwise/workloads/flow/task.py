"""What a flow workload is about: a model, conditions to train on and to hold out, and how clips are judged.
What a clip is made from: a prompt, a source clip, a camera path. All of it makes the group's id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.groups import group_id
from groupwise.rewards.call import RewardFunction
from groupwise.workloads.flow.cameras import check_camera_path

if TYPE_CHECKING:
    from groupwise.workloads.flow.models.base import FlowModel


@dataclass(frozen=True)
class Condition:
    prompt: str
    source: Float[Tensor, "channels frames height width"] | None = None
    """The clip that is to be seen from elsewhere, in -1..1; None for models without one."""
    camera: Float[Tensor, "frames 12"] | None = None
    """Poses (camera to world, 3x4) of the generated latent frames, relative to the first."""
    name: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the rewards need; it reaches them by these names."""


@dataclass(frozen=True)
class ConditionSpec:
    """What a model wants of its conditions."""

    latent: tuple[int, ...]
    """Channels, (frames,) height, width of what is generated, in the latent space."""
    patch: tuple[int, ...]
    """Sizes that patches have along the axes after the channels."""
    source_frames: int | None = None
    """Frames that a source clip must have; None where there is none."""
    source_size: tuple[int, int] | None = None
    has_camera: bool = False


def check_sizes(asked: ConditionSpec) -> None:
    """Refuse latents that cannot be cut into the transformer's patches."""
    for axis, size, patch in zip(_AXES[-len(asked.patch) :], asked.latent[1:], asked.patch, strict=True):
        if size % patch or size < patch:
            lower, upper = size // patch * patch, (size // patch + 1) * patch
            fitting = " or ".join(str(each) for each in (lower, upper) if each)
            raise UserError(
                f"The latents' {axis} is {size}, which the transformer's patches of {patch} do not divide. Take sizes"
                f" that make it {fitting}."
            )


_AXES = ("frames", "height", "width")


def check_condition(condition: Condition, asked: ConditionSpec, where: str) -> None:
    """Refuse a condition that the model could not use, before anything is generated."""
    if asked.source_frames is not None:
        _check_source(condition.source, asked, where)
    if asked.has_camera:
        if condition.camera is None:
            raise UserError(f"{where} has no camera path: this model needs one of [{asked.latent[1]}, 12].")
        check_camera_path(condition.camera, asked.latent[1], where)


def _check_source(source: Tensor | None, asked: ConditionSpec, where: str) -> None:
    if source is None:
        raise UserError(f"{where} has no source clip: this model needs one of {asked.source_frames} frames.")
    if source.ndim != 4 or source.shape[1] < (asked.source_frames or 0):
        raise UserError(
            f"The source clip of {where} has {source.shape[1] if source.ndim == 4 else 0} frames (shape"
            f" {list(source.shape)}): it needs {asked.source_frames}, as [channels, frames, height, width]. Take a"
            " longer video, or lower the number of frames."
        )
    if asked.source_size is not None and tuple(source.shape[2:]) != asked.source_size:
        raise UserError(
            f"The source clip of {where} is {source.shape[2]} x {source.shape[3]}: it must be {asked.source_size[0]} x"
            f" {asked.source_size[1]} (height x width), the size that is generated. Resize it."
        )
    if not source.isfinite().all():
        raise UserError(f"The source clip of {where} holds a number that is not finite. Mend it, or leave it out.")


def group_ids(conditions: Sequence[Condition]) -> Int64[Tensor, " conditions"]:
    """A group's id is made from the prompt, the source clip and the camera path: equal prompts are not enough."""
    return torch.tensor(
        [group_id(nth, each.prompt, each.source, each.camera, each.name) for nth, each in enumerate(conditions)]
    )


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
    """Metrics of held-out clips that are not rewards, such as errors with a unit."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """What the task's held-out reward is made of; without them each term stands alone."""
    pictures: Mapping[str, Draw] = field(default_factory=dict)
    pictured: int = 4
    """How many of the held-out conditions are drawn."""
    notes: Sequence[str] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    """What checkpoints hold besides the weights."""
