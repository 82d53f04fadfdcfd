"""Rewards of the embedded task, from the sprites' pixels alone.

    camera    exp(-distance / 0.1) between where a sprite's centroid is and where it should be (a picture is 2 wide),
              mean over frames and over the sprites that should be in view; 0 for a sprite that is mostly missing
    quality   overlap of the sprites with those painted from the camera that explains their centroids best: intersection
              over union, mean over frames. The requested path plays no part in it.

The floor, the light and the latents are not looked at: they are left to metrics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.workloads.flow.data.cameras import motion_to_pose, split_pose
from groupwise.workloads.flow.tasks.sprites.config import LATENT_SIDE, SIDE
from groupwise.workloads.flow.tasks.sprites.latents import Clips, enlarge, opacities, sprite_masks, true_clips
from groupwise.workloads.flow.tasks.sprites.pixels import (
    HALF,
    Masks,
    SpritePositions,
    halve,
    locate_sprites,
    sprite_shares,
)
from groupwise.workloads.flow.tasks.sprites.scene import Centers, light_levels

TOLERANCE = 0.1
"""Distance at which a sprite's part of the camera reward has fallen to 1/e: 2.4 of 48 pixels."""
_MIN_EXPECTED_AREA = 6.0
"""Sprites of which less should be in view are not asked for."""
_MIN_SHARE = 0.25
"""A sprite with less than this share of its area is missing."""
_MISSING_DISTANCE = 0.5
"""Counted for a missing sprite in the error in pixels."""
_MIN_AREA, _MAX_CENTROID = 4.0, 0.72
"""Sprites that are seen as a whole: larger than this, and their centroid not near the border."""
_CUT_WEIGHT, _ABSENT_WEIGHT = 0.02, 1e-4
"""In the fit of the camera, of a sprite that the border may cut, and of one that is not seen; others have 1."""
_CLIPS_AT_ONCE = 16


class SpritesRewards:
    """Reward functions of TRL's signature; clips are judged once for all of them."""

    def __init__(self) -> None:
        self._last: tuple[list[Tensor], dict[str, Tensor]] | None = None

    def term(self, name: str) -> Callable[..., list[float]]:
        """The function for `camera`, `quality` or `error_px`."""

        def judge(prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
            return self._judge(prompts, completions, columns)[name].tolist()

        return judge

    def _judge(self, prompts: Sequence[str], clips: Sequence[Tensor], columns: dict[str, Any]) -> dict[str, Tensor]:
        if self._last is not None and list(map(id, self._last[0])) == list(map(id, clips)):
            return self._last[1]
        light, parts = light_levels(prompts), []
        for start in range(0, len(clips), _CLIPS_AT_ONCE):
            rows = slice(start, start + _CLIPS_AT_ONCE)
            expected = SpritePositions(*(torch.stack(columns[name][rows]) for name in ("centroid", "area")))
            parts.append(
                judge_clips(torch.stack(list(clips[rows])), torch.stack(columns["scene"][rows]), light[rows], expected)
            )
        terms = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        self._last = (list(clips), terms)
        return terms


def judge_clips(
    clips: Clips, centers: Centers, light: Float[Tensor, " clips"], expected: SpritePositions
) -> dict[str, Float[Tensor, " clips"]]:
    """`camera`, `quality`, and `error_px`: the mean distance of centroids in pixels."""
    masks = sprite_shares(halve(clips), light)
    seen = locate_sprites(masks)
    asked = (expected.area > _MIN_EXPECTED_AREA).float()
    missing = seen.area <= _MIN_SHARE * expected.area
    distance = (seen.centroid - expected.centroid).norm(dim=-1)
    hits = torch.where(missing, 0.0, (-distance / TOLERANCE).exp())
    pixels = torch.where(missing, _MISSING_DISTANCE, distance) * SIDE / 2
    return {
        "camera": ((hits * asked).sum(1) / asked.sum(1).clamp(min=1)).mean(1),
        "quality": _overlap(masks, centers, find_camera(seen, centers)),
        "error_px": (pixels * asked).sum((1, 2)) / asked.sum((1, 2)).clamp(min=1),
    }


def expected_positions(
    centers: Centers, camera: Float[Tensor, "clips frames 12"], light: Float[Tensor, " clips"]
) -> SpritePositions:
    """Where the sprites are in the clips that a camera on the path would show."""
    return locate_sprites(sprite_shares(halve(true_clips(centers, camera, light)), light))


def find_camera(seen: SpritePositions, centers: Centers) -> Float[Tensor, "clips frames 12"]:
    """The camera from which the sprites look most like those seen.

    First a fit to the centroids of whole sprites, then one to all: where the border cuts a sprite, its centroid is off
    its center by as much as that of the sprite painted from the first camera.
    """
    present = (seen.area > _MIN_AREA).float()
    whole = present * (seen.centroid.abs().amax(-1) < _MAX_CENTROID).float()
    first = _fit_camera(seen.centroid, centers, whole + _CUT_WEIGHT * present + _ABSENT_WEIGHT)
    painted = locate_sprites(_painted(centers, first))
    shift = _project(centers, first) - painted.centroid
    is_cut = ((painted.area > _MIN_AREA) & (seen.centroid.abs().amax(-1) >= _MAX_CENTROID))[..., None]
    centroid = torch.where(is_cut, seen.centroid + shift, seen.centroid)
    return _fit_camera(centroid, centers, present + _ABSENT_WEIGHT)


def _fit_camera(
    centroid: Float[Tensor, "clips 3 frames 2"], centers: Centers, weight: Float[Tensor, "clips 3 frames"]
) -> Float[Tensor, "clips frames 12"]:
    """center = depth x rotation(roll) x centroid + origin, by weighted least squares in closed form (Umeyama 1991)."""
    weight = weight.transpose(1, 2)[..., None]
    weight = weight / weight.sum(2, keepdim=True)
    picture, world = centroid.transpose(1, 2), centers[:, None]
    picture_mean, world_mean = ((weight * points).sum(2, keepdim=True) for points in (picture, world))
    from_picture, from_world = picture - picture_mean, world - world_mean
    aligned = (weight * from_picture * from_world).sum((-1, -2))
    crossed = (weight[..., 0] * _cross(from_picture, from_world)).sum(-1)
    roll = torch.atan2(crossed, aligned)
    spread = (weight * from_picture.square()).sum((-1, -2)).clamp(min=1e-6)
    depth = (torch.hypot(aligned, crossed) / spread).clamp(0.4, 2.0)
    rotation = torch.stack([roll.cos(), -roll.sin(), roll.sin(), roll.cos()], dim=-1).unflatten(-1, (2, 2))
    origin = world_mean[:, :, 0] - depth[..., None] * (rotation @ picture_mean.mT)[..., 0]
    still = torch.zeros(*roll.shape, 2)
    return motion_to_pose(torch.cat([still, roll[..., None], origin, 1 - depth[..., None]], dim=-1))


def _project(centers: Centers, camera: Float[Tensor, "clips frames 12"]) -> Float[Tensor, "clips 3 frames 2"]:
    """Where the camera sees the centers, for one that looks straight ahead."""
    rotation, origin = split_pose(camera)
    away = (centers[:, :, None] - origin[:, None, :, :2]) / (1 - origin[:, None, :, 2:])
    return torch.einsum("nfji,nkfj->nkfi", rotation[..., :2, :2], away)


def _cross(first: Float[Tensor, "*batch 2"], second: Float[Tensor, "*batch 2"]) -> Float[Tensor, "*batch"]:
    return first[..., 0] * second[..., 1] - first[..., 1] * second[..., 0]


def _overlap(masks: Masks, centers: Centers, camera: Float[Tensor, "clips frames 12"]) -> Float[Tensor, " clips"]:
    """Intersection over union of the masks with those of the scene seen from the camera, mean over frames."""
    painted, axes = _painted(centers, camera), (1, 3, 4)
    union = torch.maximum(painted, masks).sum(axes).clamp(min=1)
    return (torch.minimum(painted, masks).sum(axes) / union).mean(1)


def _painted(centers: Centers, camera: Float[Tensor, "clips frames 12"]) -> Masks:
    """The sprites seen from the camera, enlarged from the latents' size as the decoder does it."""
    small = sprite_masks(centers, camera, LATENT_SIDE)
    return opacities(enlarge(small, HALF))
