"""Latents of the embedded task in closed form, and the fixed decoder that paints 48 x 48 pixels from 12 x 12 of them.

Seven channels: a soft mask of each sprite, the floor's pattern, the light, and how far each pixel's point of the plane
has moved since the first frame, across and down. The decoder does not use the last two.
"""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from groupwise.workloads.flow.data.cameras import motion_to_pose
from groupwise.workloads.flow.tasks.sprites.config import LATENT_CHANNELS, LATENT_SIDE, SCALE, SIDE
from groupwise.workloads.flow.tasks.sprites.scene import (
    Centers,
    floor_pattern,
    pixel_rays,
    project_to_plane,
    sprite_distances,
)

Latents = Float[Tensor, "clips 7 frames side side"]
Clips = Float[Tensor, "clips 3 frames height width"]

PALETTE = torch.tensor([[0.90, 0.20, 0.20], [0.15, 0.75, 0.25], [0.20, 0.35, 0.95]])
"""Red, green and blue of disc, square and triangle by day."""
FLOOR_GRAY = 0.55
_TILE_CONTRAST = 0.13
_SOFTNESS = 0.25
"""Width of the masks' edges, as seen from distance 1."""
_SHARPNESS = 12.0
"""How much the decoder sharpens the masks."""
_MIDDLE_LIGHT, _LIGHT_RANGE = 0.7, 0.3
_MEAN = torch.tensor([-0.75, -0.75, -0.75, 0.0, 0.0, 0.0, 0.0]).view(1, LATENT_CHANNELS, 1, 1, 1)
_STD = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.8, 0.25, 0.25]).view(1, LATENT_CHANNELS, 1, 1, 1)
_PAINTED_AT_ONCE = 32
_SOURCE_DISTANCE = 0.5
"""How much farther away the source picture is taken from than the first frame."""


def sprite_masks(
    centers: Centers, camera: Float[Tensor, "clips frames 12"], side: int
) -> Float[Tensor, "clips 3 frames side side"]:
    """From -1 outside of a sprite to 1 inside, with edges that look equally soft from all distances."""
    depth = 1 - camera[..., 11]
    distances = sprite_distances(centers, project_to_plane(camera, side)) / depth[:, None, :, None]
    return torch.tanh(distances / _SOFTNESS).unflatten(-1, (side, side))


def latents_of(
    centers: Centers, camera: Float[Tensor, "clips frames 12"], light: Float[Tensor, " clips"]
) -> Float[Tensor, "clips 7 frames side side"]:
    """What a perfect model would generate, scaled to about unit variance."""
    points = project_to_plane(camera, LATENT_SIDE)
    moved = points - pixel_rays(LATENT_SIDE)[:, :2]
    brightness = ((light - _MIDDLE_LIGHT) / _LIGHT_RANGE).view(-1, 1, 1).expand(points.shape[:-1])
    planes = torch.stack([floor_pattern(points), brightness, *moved.unbind(-1)], dim=1)
    masks = sprite_masks(centers, camera, LATENT_SIDE)
    return (torch.cat([masks, planes.unflatten(-1, (LATENT_SIDE, LATENT_SIDE))], dim=1) - _MEAN) / _STD


def decode(latents: Latents) -> Clips:
    """Pixels in -1..1: enlarge, sharpen the masks, paint the sprites over the floor, light the scene."""
    clips = len(latents)
    planes = (latents * _STD.to(latents) + _MEAN.to(latents)).transpose(1, 2).flatten(0, 1)
    large = enlarge(planes[:, :5], SIDE)
    floor = FLOOR_GRAY + _TILE_CONTRAST * torch.tanh(3 * large[:, 3:4])
    painted = floor.expand(-1, 3, -1, -1)
    for opacity, color in zip(opacities(large[:, :3]).split(1, dim=1), PALETTE.to(latents), strict=True):
        painted = painted * (1 - opacity) + opacity * color.view(1, 3, 1, 1)
    lit = painted * (_MIDDLE_LIGHT + _LIGHT_RANGE * large[:, 4:5]).clamp(0.2, 1.1)
    return (2 * lit - 1).clamp(-1, 1).unflatten(0, (clips, -1)).transpose(1, 2)


def enlarge(planes: Float[Tensor, "*planes small small"], side: int) -> Float[Tensor, "*planes side side"]:
    """Bicubic interpolation, as two products with its weights: 20 times as fast on the CPU as torch's."""
    weights = _bicubic_weights(planes.shape[-1], side, planes.dtype, planes.device)
    return weights @ planes @ weights.T


@cache
def _bicubic_weights(small: int, large: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "large small"]:
    rows = torch.eye(small, dtype=torch.float64)[None, None]
    weights = functional.interpolate(rows, size=(small, large), mode="bicubic", align_corners=False)[0, 0].T
    return weights.to(device, dtype)


def opacities(masks: Tensor) -> Tensor:
    """How opaque a sprite is painted, from its mask: 0..1."""
    return torch.sigmoid(_SHARPNESS * masks)


def true_clips(centers: Centers, camera: Float[Tensor, "clips frames 12"], light: Float[Tensor, " clips"]) -> Clips:
    """What a camera on the path would show; painted a few at a time, since the enlarged latents are large."""
    parts = zip(*(column.split(_PAINTED_AT_ONCE) for column in (centers, camera, light)), strict=True)
    return torch.cat([decode(latents_of(*part)) for part in parts])


def source_pictures(centers: Centers) -> Float[Tensor, "scenes 3 1 height width"]:
    """A wide shot of each scene by day: clips of one frame."""
    camera = motion_to_pose(torch.tensor([0.0, 0, 0, 0, 0, -_SOURCE_DISTANCE])).expand(len(centers), 1, 12)
    return true_clips(centers, camera, torch.ones(len(centers)))


def encode_source(source: Float[Tensor, "clips 3 1 height width"]) -> Float[Tensor, "clips 7 1 side side"]:
    """The picture's colors at the latents' size; the channels that a picture does not have are 0."""
    assert source.shape[-1] == SIDE
    small = 2 * functional.avg_pool2d(source[:, :, 0], SCALE)
    return functional.pad(small, (0, 0, 0, 0, 0, LATENT_CHANNELS - 3))[:, :, None]
