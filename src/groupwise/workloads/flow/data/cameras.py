"""Camera paths [frames, 12]: the 3x4 pose (camera to world) of each frame, relative to a reference camera."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.errors import UserError

CameraPath = Float[Tensor, "*batch frames 12"]
Motion = Float[Tensor, "*batch 6"]
"""A rotation vector (axis x angle) and a translation."""


def check_camera_path(camera: Tensor, frames: int, source: str) -> None:
    """Refuse a camera path that does not have a valid pose for each of the frames."""
    if camera.ndim != 2 or camera.shape[1] != 12:
        raise UserError(
            f"The camera path of {source} has shape {list(camera.shape)}: it must be [frames, 12], a 3x4 pose in each"
            " row. Flatten the poses row by row."
        )
    if len(camera) != frames:
        raise UserError(
            f"The camera path of {source} has {len(camera)} poses for {frames} frames: it must have one for every"
            " (latent) frame that is generated. Take the poses of exactly those frames."
        )
    if not camera.isfinite().all():
        frame = int((~camera.isfinite()).any(1).nonzero()[0])
        raise UserError(
            f"The camera path of {source} holds {camera[frame][~camera[frame].isfinite()][0].item()} in frame {frame}:"
            " every number must be finite. Fix the pose or remove this condition."
        )
    rotation = camera.double().view(-1, 3, 4)[..., :3]
    deviation = (rotation @ rotation.mT - torch.eye(3, dtype=torch.float64)).abs().amax((1, 2))
    invalid = (deviation > 1e-2) | (torch.linalg.det(rotation) < 0)
    if invalid.any():
        frame = int(invalid.nonzero()[0])
        how = f"R R^T differs from 1 by {deviation[frame]:.2g}" if deviation[frame] > 1e-2 else "it is mirrored"
        raise UserError(
            f"The camera path of {source} is not a rigid motion in frame {frame}: the first three columns of each 3x4"
            f" pose must be a rotation ({how}). Check the order of the 12 numbers; poses of a left-handed world must be"
            " relative to a camera of it."
        )


def split_pose(camera: CameraPath) -> tuple[Float[Tensor, "*batch frames 3 3"], Float[Tensor, "*batch frames 3"]]:
    poses = camera.unflatten(-1, (3, 4))
    return poses[..., :3], poses[..., 3]


def join_pose(
    rotation: Float[Tensor, "*batch 3 3"], translation: Float[Tensor, "*batch 3"]
) -> Float[Tensor, "*batch 12"]:
    return torch.cat([rotation, translation[..., None]], dim=-1).flatten(-2)


def motion_to_pose(motion: Motion) -> Float[Tensor, "*batch 12"]:
    """The pose after a motion from the first pose (Rodrigues' formula)."""
    vector = motion[..., :3]
    angle = vector.norm(dim=-1)[..., None, None]
    cross = _cross_matrix(vector)
    # sin(a)/a and (1 - cos(a))/a^2, which are smooth at 0
    first = torch.sinc(angle / torch.pi)
    second = torch.sinc(angle / (2 * torch.pi)) ** 2 / 2
    rotation = torch.eye(3).to(motion) + first * cross + second * (cross @ cross)
    return join_pose(rotation, motion[..., 3:])


def _cross_matrix(vector: Float[Tensor, "*batch 3"]) -> Float[Tensor, "*batch 3 3"]:
    x, y, z = vector.unbind(-1)
    zero = torch.zeros_like(x)
    return torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).unflatten(-1, (3, 3))
