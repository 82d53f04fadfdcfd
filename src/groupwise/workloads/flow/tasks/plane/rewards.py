"""How well a clip was filmed: by the camera that was asked for, and of the scene that was shown. All in closed form.

    camera    (exp(-rotation error / 0.1 rad) + exp(-translation error / 0.1)) / 2, a mean over the frames
    quality   share of the frames' pixels that the scene explains, seen from wherever the camera was found to be

Errors are those between the camera found in the clip and the one asked for, at the same frames; translations after one
scale for the path has been fitted.
Find where a camera was from the frames it took of a known scene, and how well any camera explains them.

Gauss-Newton with damping on the pixel differences (Lucas and Kanade, "An iterative image registration technique",
1981), one frame at a time, each begun where the frame before it was found. Where the camera was asked to go is not
looked at, so a clip that shows nothing is not found there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.workloads.flow.cameras import motion_to_pose, rotation_errors, translation_errors
from groupwise.workloads.flow.tasks.plane.scene import LARGEST, Scenes, brightness, project_to_plane

_ROUNDS = 5
_DAMPING = 1e-3
_NUDGE = 3e-3
_FARTHEST = 0.9
_FREE = torch.tensor([limit > 0 for limit in LARGEST])


@dataclass(frozen=True)
class CameraEstimate:
    """The camera of each frame, and what it leaves unexplained."""

    motion: Float[Tensor, "clips frames 6"]
    camera: Float[Tensor, "clips frames 12"]
    explained: Float[Tensor, "clips frames"]
    """1 - squared pixel differences / squared pixels of the scene seen from there; at most 1."""


def estimate_camera(scenes: Scenes, clip: Float[Tensor, "clips colors frames side side"]) -> CameraEstimate:
    """The cameras of clips of known scenes."""
    frames = clip.permute(2, 0, 3, 4, 1).flatten(2, 3)
    motion = torch.zeros(clip.shape[0], 6)
    found, explained = [], []
    for frame in frames:
        motion = _register(scenes, frame, motion)
        seen = scenes.paint(project_to_plane(motion_to_pose(motion)))
        error = (frame - seen).square().flatten(1).sum(1) / seen.square().flatten(1).sum(1).clamp(min=1e-6)
        found.append(motion)
        explained.append(1 - error)
    motions = torch.stack(found, dim=1)
    return CameraEstimate(motions, motion_to_pose(motions), torch.stack(explained, dim=1))


def _register(scenes: Scenes, frame: Tensor, motion: Tensor) -> Tensor:
    """Walk from a motion to the one that explains the frame best; a step that explains less is not taken."""
    cost = _cost(scenes, frame, motion)
    damping = torch.full_like(cost, _DAMPING)
    for _ in range(_ROUNDS):
        slope, gap = _linearised(scenes, frame, motion)
        normal = slope.mT @ slope / slope.shape[1]
        pull = (slope.mT @ gap[..., None])[..., 0] / slope.shape[1]
        ridge = torch.eye(6).to(normal) * damping[:, None, None]
        step = torch.linalg.solve((normal + ridge).double(), pull.double()).float()  # turning and moving look alike
        tried = (motion + step).clamp(-_FARTHEST, _FARTHEST)
        tried_cost = _cost(scenes, frame, tried)
        better = tried_cost < cost
        motion = torch.where(better[:, None], tried, motion)
        cost = torch.where(better, tried_cost, cost)
        damping = torch.where(better, damping / 4, damping * 8)
    return motion


def _cost(scenes: Scenes, frame: Tensor, motion: Tensor) -> Tensor:
    return (frame - scenes.paint(project_to_plane(motion_to_pose(motion)))).square().flatten(1).sum(1)


def _linearised(scenes: Scenes, frame: Tensor, motion: Tensor) -> tuple[Tensor, Tensor]:
    """How every pixel value changes with the six numbers, and how far it is from the frame's."""
    places = project_to_plane(motion_to_pose(motion))
    nudged = motion[:, None] + _NUDGE * torch.eye(6).to(motion)
    moved = project_to_plane(motion_to_pose(nudged).flatten(0, 1)).unflatten(0, (-1, 6))
    shift = (moved - places[:, None]) / _NUDGE
    slope = torch.einsum("npck,njpk->npcj", scenes.slope(places), shift) * _FREE
    return slope.flatten(1, 2), (frame - scenes.paint(places)).flatten(1)


_TOLERATED = 0.1


class PlaneRewards:
    """Rewards of TRL's signature; each clip is located once for all of them."""

    def __init__(self) -> None:
        self._last: tuple[list[Tensor], CameraEstimate] | None = None

    def camera(self, prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
        rotation, translation = self._errors(prompts, completions, columns)
        return ((-rotation / _TOLERATED).exp() + (-translation / _TOLERATED).exp()).div(2).mean(1).tolist()

    def quality(self, prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
        return self._located(prompts, completions, columns).explained.clamp(min=0).mean(1).tolist()

    def rotation_error(self, prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
        return self._errors(prompts, completions, columns)[0].mean(1).tolist()

    def translation_error(self, prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
        return self._errors(prompts, completions, columns)[1].mean(1).tolist()

    def _errors(
        self, prompts: Sequence[str], clips: Sequence[Tensor], columns: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        found, wanted = self._located(prompts, clips, columns).camera, torch.stack(columns["cameras"])
        return rotation_errors(found, wanted), translation_errors(found, wanted)

    def _located(self, prompts: Sequence[str], clips: Sequence[Tensor], columns: dict[str, Any]) -> CameraEstimate:
        if self._last is not None and list(map(id, self._last[0])) == list(map(id, clips)):
            return self._last[1]
        scenes = Scenes.stacked(columns["scene"])
        found = estimate_camera(scenes, torch.stack(list(clips)) / brightness(prompts).view(-1, 1, 1, 1, 1))
        self._last = (list(clips), found)
        return found
