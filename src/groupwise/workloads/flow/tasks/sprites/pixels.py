"""What can be read off the pixels of a clip: how much of each sprite is where. Judges see clips only through this."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from groupwise.workloads.flow.tasks.sprites.config import SIDE
from groupwise.workloads.flow.tasks.sprites.latents import PALETTE, Clips

HALF = SIDE // 2
"""Judges look at pictures of half the size."""
SmallClips = Float[Tensor, "clips 3 frames 24 24"]
Masks = Float[Tensor, "clips 3 frames 24 24"]

_CHROMA = PALETTE - PALETTE.mean(1, keepdim=True)
_MATCH = _CHROMA / _CHROMA.square().sum(1, keepdim=True)
_FAINT = 0.15
"""Pixels that are less of a sprite than this do not count towards its centroid."""


def halve(clips: Clips) -> SmallClips:
    return functional.avg_pool3d(clips, (1, 2, 2))


def sprite_shares(clips: SmallClips, light: Float[Tensor, " clips"]) -> Masks:
    """How much of each pixel is disc, square and triangle, by its color; gray is none of them."""
    colors = (clips + 1) / 2 / light.view(-1, 1, 1, 1, 1)
    chroma = colors - colors.mean(1, keepdim=True)
    return torch.einsum("ncfhw,kc->nkfhw", chroma, _MATCH).clamp(0, 1)


@dataclass(frozen=True)
class SpritePositions:
    """Where the sprites are in each frame, and how large."""

    centroid: Float[Tensor, "clips 3 frames 2"]
    """Across and down, from -1 to 1."""
    area: Float[Tensor, "clips 3 frames"]
    """In pixels of the halved picture."""


def locate_sprites(masks: Masks) -> SpritePositions:
    centers = (torch.arange(HALF) + 0.5) * 2 / HALF - 1
    clear = torch.where(masks > _FAINT, masks, 0.0)
    total = clear.sum((-1, -2)).clamp(min=1e-3)
    across, down = (clear.sum(axis) @ centers / total for axis in (-2, -1))
    return SpritePositions(torch.stack([across, down], dim=-1), masks.sum((-1, -2)))
