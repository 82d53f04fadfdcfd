"""Rewards of the embedded task: estimate the camera of a clip of a known scene, and compare it with the requested one.

    camera    (exp(-rotation error / 0.1 rad) + exp(-translation error / 0.1)) / 2, mean over the frames
    quality   share of the pixels' variation that the scene explains, seen from the estimated camera

The estimate is damped Gauss-Newton on the pixel differences (Lucas and Kanade, "An iterative image registration
technique", 1981), frame by frame, each started from the frame before. It never uses the requested path, so a clip that
shows nothing is not credited with it. Translations are compared after fitting one scale per path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.workloads.flow.cameras import motion_to_pose, rotation_errors, translation_errors
from groupwise.workloads.flow.tasks.plane.scene import MAX_MOTION, Scenes, brightness, project_to_plane

_ITERATIONS = 5
_INITIAL_DAMPING = 1e-3
_DIFFERENCE_STEP = 3e-3
_SEARCH_LIMIT = 0.9
_FREE_AXES = torch.tensor([limit > 0 for limit in MAX_MOTION])
_ERROR_SCALE = 0.1


class PlaneRewards:
    """Reward functions of TRL's signature; the camera of each clip is estimated once for all of them."""

    def __init__(self) -> None:
        self._last: tuple[list[Tensor], CameraEstimate] | None = None

    def camera(self, prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
        rotation, translation = self._errors(prompts, completions, columns)
        return ((-rotation / _ERROR_SCALE).exp() + (-translation / _ERROR_SCALE).exp()).div(2).mean(1).tolist()

    def quality(self, prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
        return self._estimate(prompts, completions, columns).explained.clamp(min=0).mean(1).tolist()

    def rotation_error(self, prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
        return self._errors(prompts, completions, columns)[0].mean(1).tolist()

    def translation_error(self, prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
        return self._errors(prompts, completions, columns)[1].mean(1).tolist()

    def _errors(
        self, prompts: Sequence[str], clips: Sequence[Tensor], columns: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        estimated, requested = self._estimate(prompts, clips, columns).camera, torch.stack(columns["cameras"])
        return rotation_errors(estimated, requested), translation_errors(estimated, requested)

    def _estimate(self, prompts: Sequence[str], clips: Sequence[Tensor], columns: dict[str, Any]) -> CameraEstimate:
        if self._last is not None and list(map(id, self._last[0])) == list(map(id, clips)):
            return self._last[1]
        scenes = Scenes.concatenate(columns["scene"])
        estimate = estimate_camera(scenes, torch.stack(list(clips)) / brightness(prompts))
        self._last = (list(clips), estimate)
        return estimate


@dataclass(frozen=True)
class CameraEstimate:
    """The camera of each frame of some clips, and how well it explains the frame."""

    camera: Float[Tensor, "clips frames 12"]
    explained: Float[Tensor, "clips frames"]
    """1 - squared pixel differences / squared pixels of the scene seen from there; at most 1."""


def estimate_camera(scenes: Scenes, clip: Float[Tensor, "clips colors frames side side"]) -> CameraEstimate:
    """The cameras of clips of known scenes."""
    frames = clip.permute(2, 0, 3, 4, 1).flatten(2, 3)
    motion = torch.zeros(clip.shape[0], 6)
    cameras, explained = [], []
    for frame in frames:
        motion = _register(scenes, frame, motion)
        cameras.append(motion_to_pose(motion))
        rendered = scenes.texture(project_to_plane(cameras[-1]))
        squares = rendered.square().flatten(1).sum(1).clamp(min=1e-6)
        explained.append(1 - (frame - rendered).square().flatten(1).sum(1) / squares)
    return CameraEstimate(torch.stack(cameras, dim=1), torch.stack(explained, dim=1))


def _register(scenes: Scenes, frame: Tensor, motion: Tensor) -> Tensor:
    """The motion that explains the frame best, by Gauss-Newton; steps that raise the cost are rejected."""
    cost = _cost(scenes, frame, motion)
    damping = torch.full_like(cost, _INITIAL_DAMPING)
    for _ in range(_ITERATIONS):
        jacobian, residual = _linearize(scenes, frame, motion)
        hessian = jacobian.mT @ jacobian / jacobian.shape[1]
        gradient = (jacobian.mT @ residual[..., None])[..., 0] / jacobian.shape[1]
        ridge = torch.eye(6).to(hessian) * damping[:, None, None]
        # in float64: rotation and translation look alike, so the system is nearly singular
        step = torch.linalg.solve((hessian + ridge).double(), gradient.double()).float()
        candidate = (motion + step).clamp(-_SEARCH_LIMIT, _SEARCH_LIMIT)
        candidate_cost = _cost(scenes, frame, candidate)
        better = candidate_cost < cost
        motion = torch.where(better[:, None], candidate, motion)
        cost = torch.where(better, candidate_cost, cost)
        damping = torch.where(better, damping / 4, damping * 8)
    return motion


def _cost(scenes: Scenes, frame: Tensor, motion: Tensor) -> Tensor:
    return (frame - scenes.texture(project_to_plane(motion_to_pose(motion)))).square().flatten(1).sum(1)


def _linearize(scenes: Scenes, frame: Tensor, motion: Tensor) -> tuple[Tensor, Tensor]:
    """The derivative of every pixel value by the six motion numbers, and its difference from the frame's."""
    points = project_to_plane(motion_to_pose(motion))
    varied = motion[:, None] + _DIFFERENCE_STEP * torch.eye(6).to(motion)
    moved = project_to_plane(motion_to_pose(varied).flatten(0, 1)).unflatten(0, (-1, 6))
    shift = (moved - points[:, None]) / _DIFFERENCE_STEP
    jacobian = torch.einsum("npck,njpk->npcj", scenes.texture_gradient(points), shift) * _FREE_AXES
    return jacobian.flatten(1, 2), (frame - scenes.texture(points)).flatten(1)
