"""What a flow task consists of: its conditions (prompt, source clip, camera path), its model and its rewards.

ConditionSpec says what a model needs of a condition; conditions are checked against it before anything is generated.
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
from groupwise.workloads.flow.data.cameras import check_camera_path
from groupwise.workloads.flow.data.clips import ClipFile, to_float

if TYPE_CHECKING:
    from groupwise.workloads.base import EvaluationReport
    from groupwise.workloads.flow.models.base import FlowModel
    from groupwise.workloads.flow.workload import FlowWorkload


@dataclass(frozen=True)
class Condition:
    """What a clip is generated from."""

    prompt: str
    source_clip: Float[Tensor, "channels frames height width"] | None = None
    """The clip to show along another camera path, in -1..1; None for models without one, and where it is in a file."""
    camera: Float[Tensor, "frames 12"] | None = None
    """Poses (camera to world, 3x4) of the generated latent frames, relative to a reference camera: that of the source
    clip's first frame, or the path's own first pose."""
    name: str = ""
    reward_columns: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the reward functions, by name."""
    source_file: ClipFile | None = None
    """In the place of `source_clip`: read when it is needed, and not kept."""

    def read_source(self, frames: int | None = None) -> Float[Tensor, "channels frames height width"] | None:
        """The source clip, or its first frames."""
        if self.source_file is not None:
            return to_float(self.source_file.read(frames))
        return self.source_clip if self.source_clip is None else self.source_clip[:, :frames]

    @property
    def source_shape(self) -> tuple[int, ...] | None:
        """Channels, frames, height and width of the source clip; nothing is read."""
        if self.source_file is not None:
            return (3, *self.source_file.shape)
        return None if self.source_clip is None else tuple(self.source_clip.shape)

    def source_key(self) -> str:
        """A hash of the source clip's content."""
        return self.source_file.content_key() if self.source_file is not None else str(group_id(0, self.source_clip))


def group_ids(conditions: Sequence[Condition]) -> Int64[Tensor, " conditions"]:
    """Ids made from prompt, source clip, camera path and name: equal prompts are not enough.

    Of a clip in a file its name, bytes and shape count, so that no rank has to read clips that others generate from.
    """
    return torch.tensor([_group_id(index, condition) for index, condition in enumerate(conditions)])


def _group_id(index: int, condition: Condition) -> int:
    file = condition.source_file
    source = condition.source_clip if file is None else f"{file.name}:{file.file_bytes}:{file.shape}"
    return group_id(index, condition.prompt, source, condition.camera, condition.name)


@dataclass(frozen=True)
class ConditionSpec:
    """What a model needs of its conditions, and the shape of the latents that it generates."""

    latent_shape: tuple[int, ...]
    """Channels, (frames,) height, width."""
    patch_size: tuple[int, ...]
    """Along the axes after the channels."""
    source_frames: int | None = None
    """Frames that a source clip must have; None where there is none."""
    source_size: tuple[int, int] | None = None
    """Height and width of a source clip."""
    has_camera: bool = False


_AXES = ("frames", "height", "width")


def check_latent_shape(spec: ConditionSpec) -> None:
    """Refuse latents that cannot be cut into the transformer's patches."""
    for axis, size, patch in zip(_AXES[-len(spec.patch_size) :], spec.latent_shape[1:], spec.patch_size, strict=True):
        if size % patch or size < patch:
            lower, upper = size // patch * patch, (size // patch + 1) * patch
            nearest = " or ".join(str(value) for value in (lower, upper) if value)
            raise UserError(
                f"The latents' {axis} is {size}, which the transformer's patches of {patch} do not divide. Take sizes"
                f" that make it {nearest}."
            )


def check_condition(condition: Condition, spec: ConditionSpec, source: str) -> None:
    """Refuse a condition that the model cannot use. `source` says in messages where it comes from."""
    if spec.source_frames is not None:
        _check_source_clip(condition, spec, source)
    if spec.has_camera:
        if condition.camera is None:
            raise UserError(f"{source} has no camera path: this model needs one of [{spec.latent_shape[1]}, 12].")
        check_camera_path(condition.camera, spec.latent_shape[1], source)


def _check_source_clip(condition: Condition, spec: ConditionSpec, source: str) -> None:
    shape, clip = condition.source_shape, condition.source_clip
    if shape is None:
        raise UserError(f"{source} has no source clip: this model needs one of {spec.source_frames} frames.")
    if len(shape) != 4 or shape[1] < (spec.source_frames or 0):
        raise UserError(
            f"The source clip of {source} has {shape[1] if len(shape) == 4 else 0} frames (shape"
            f" {list(shape)}): it needs {spec.source_frames}, as [channels, frames, height, width]. Take a"
            " longer video, or lower the number of frames."
        )
    if spec.source_size is not None and shape[2:] != spec.source_size:
        raise UserError(
            f"The source clip of {source} is {shape[2]} x {shape[3]}: it must be {spec.source_size[0]} x"
            f" {spec.source_size[1]} (height x width), the size that is generated. Resize it."
        )
    if clip is not None and not clip.isfinite().all():
        raise UserError(f"The source clip of {source} holds a number that is not finite. Fix the clip or remove it.")


ClipDrawing = Callable[[Sequence[Condition], Tensor], Callable[[Path], None]]
"""(conditions, their clips) -> a function that writes an image of them to a path."""


@dataclass(frozen=True)
class FlowTask:
    """Everything that FlowWorkload needs besides its config."""

    model: FlowModel
    conditions: Sequence[Condition]
    held_out: Sequence[Condition]
    rewards: Mapping[str, RewardFunction]
    """By name: `reward(prompts, completions, **columns)`, TRL's signature. A completion is a clip [channels, frames,
    height, width] or an image [channels, height, width] in -1..1; columns are `cameras`, `sources` (a sequence that
    reads clips from files when they are asked for), `names`, and the conditions' `reward_columns`."""
    step_rewards: Mapping[str, RewardFunction] = field(default_factory=dict)
    """The same for each sampled step: a completion is the clean clip that the model predicts after that step."""
    eval_metrics: Mapping[str, RewardFunction] = field(default_factory=dict)
    """Metrics of held-out clips that are not rewards, such as errors with a unit."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the reward terms in the held-out reward; without them each term is reported alone."""
    images: Mapping[str, ClipDrawing] = field(default_factory=dict)
    """Images of held-out clips, by file name."""
    num_images: int = 4
    """How many of the held-out conditions are drawn."""
    final_report: Callable[[FlowWorkload], EvaluationReport] | None = None
    """What `groupwise eval` shows besides the metrics."""
    notes: Sequence[str] = ()
    """Shown with the preflight checks."""
    checkpoint_files: Mapping[str, bytes] = field(default_factory=dict)
    """Written into every checkpoint besides the weights."""
