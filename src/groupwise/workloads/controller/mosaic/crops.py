"""Crops of a mosaic: an overview and 3, 6 or 12 parts of it, all of the same size in pixels."""

from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from groupwise.core.errors import UserError
from groupwise.workloads.controller.mosaic.scene import COLUMNS, ROWS, TILES

CROP_PIXELS = 12
PATCH_PIXELS = 4
PATCHES_PER_SIDE = CROP_PIXELS // PATCH_PIXELS
TOKENS_PER_CROP = PATCHES_PER_SIDE**2
# Brightness, and where in the mosaic a pixel is: across and down, from -1 to 1.
CHANNELS = 3
_BRIGHTNESS_MEAN = 0.25
_BRIGHTNESS_STD = 0.35


class Tier(StrEnum):
    """How finely a mosaic is looked at."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


CROPS = {Tier.LOW: 3, Tier.MEDIUM: 6, Tier.HIGH: 12}


def crops_with_overview(tier: Tier) -> int:
    """Return how many crops the vision tower sees at this tier."""
    return 1 + CROPS[tier]


def image_tokens(tier: Tier) -> int:
    """Return how many tokens the crops of this tier become."""
    return crops_with_overview(tier) * TOKENS_PER_CROP


def cut(pixels: Float[Tensor, "mosaics height width"], tier: Tier) -> Float[Tensor, "mosaics crops 3 side side"]:
    """Return the overview and the crops of each mosaic, shrunk to CROP_PIXELS where they are larger.

    Fewer crops cover more tiles each, so they are coarser: a tile is 12, 6 or 3 pixels wide.
    """
    count, height, width = pixels.shape
    if height % ROWS or width % COLUMNS or height < ROWS * CROP_PIXELS or width < COLUMNS * CROP_PIXELS:
        raise UserError(
            f"A mosaic of {height} x {width} pixels cannot be cut into {ROWS} x {COLUMNS} tiles: height and width"
            f" must be multiples of {ROWS} and {COLUMNS}, at least {ROWS * CROP_PIXELS} x {COLUMNS * CROP_PIXELS}."
        )
    planes = torch.stack([(pixels - _BRIGHTNESS_MEAN) / _BRIGHTNESS_STD, *_place_planes(count, height, width)], dim=1)
    parts_across = CROPS[tier] // ROWS
    parts = planes.view(count, CHANNELS, ROWS, height // ROWS, parts_across, width // parts_across)
    parts = parts.permute(0, 2, 4, 1, 3, 5).reshape(-1, CHANNELS, height // ROWS, width // parts_across)
    overview = _shrink(planes)[:, None]
    return torch.cat([overview, _shrink(parts).view(count, CROPS[tier], *overview.shape[2:])], dim=1)


def _shrink(planes: Float[Tensor, "n 3 height width"]) -> Float[Tensor, "n 3 side side"]:
    return functional.interpolate(planes, size=(CROP_PIXELS, CROP_PIXELS), mode="area")


def _place_planes(count: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    across = (torch.arange(width) * 2 + 1) / width - 1
    down = (torch.arange(height) * 2 + 1) / height - 1
    return across.expand(count, height, width), down[:, None].expand(count, height, width)


def coverage(tier: Tier) -> Float[Tensor, "tokens tiles"]:
    """Return, for each image token of this tier, which share of its patch lies on which tile."""
    rows, columns = ROWS * CROP_PIXELS, COLUMNS * CROP_PIXELS
    down, across = torch.arange(rows) // CROP_PIXELS, torch.arange(columns) // CROP_PIXELS
    tile_of_pixel = down[:, None] * COLUMNS + across[None, :]
    one_hot = functional.one_hot(tile_of_pixel, TILES).permute(2, 0, 1).float()
    covered = [_patch_means(one_hot[None])]
    parts_across = CROPS[tier] // ROWS
    for row in one_hot.chunk(ROWS, dim=1):
        covered += [_patch_means(part[None]) for part in row.chunk(parts_across, dim=2)]
    return torch.cat(covered)


def _patch_means(planes: Float[Tensor, "1 tiles height width"]) -> Float[Tensor, "tokens tiles"]:
    # Patches need not align with tiles (3 patches, 4 tiles), so areas are taken at a common multiple first.
    fine = functional.interpolate(planes, scale_factor=PATCHES_PER_SIDE, mode="nearest")
    return functional.adaptive_avg_pool2d(fine, PATCHES_PER_SIDE)[0].flatten(1).T
