"""MolmoE's crops: which tiling an image gets, the crops themselves, and where their features go in the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import interpolate, pad

from groupwise.core.errors import UserError, require
from groupwise.workloads.controller.model.images import (
    CropShape,
    ImageNormalization,
    LazyCrops,
    Sides,
    SourceImage,
)
from groupwise.workloads.controller.model.molmoe.sizes import (
    CROP_SIDE,
    OVERLAP_PATCHES,
    PATCH_SIDE,
    POOLED,
    POOLED_OVERLAP,
    POOLED_WINDOW,
    feature_grid,
)

_WINDOW = CROP_SIDE - 2 * OVERLAP_PATCHES * PATCH_SIDE
"""Pixels from one tile to the next."""
_MARGIN = CROP_SIDE - _WINDOW
_PATCHES = CROP_SIDE // PATCH_SIDE
_NO_TILE = -1.0
"""The mask that the published preprocessing gives to the last crop, for a reason that is in `image_masks`."""


@dataclass(frozen=True)
class Tiling:
    """Overlapping tiles over an image that was resized to fit them, and lies in their middle."""

    rows: int
    columns: int
    height: int
    """Of the resized image, in pixels."""
    width: int

    @property
    def canvas(self) -> Sides:
        return _WINDOW * self.rows + _MARGIN, _WINDOW * self.columns + _MARGIN

    @property
    def shape(self) -> CropShape:
        """The overview and the tiles; then how they lie, which the prompt depends on."""
        crops = 1 + self.rows * self.columns
        return crops, 3, CROP_SIDE, CROP_SIDE, self.rows, self.columns, self.height, self.width

    @staticmethod
    def of_shape(shape: Sequence[int]) -> Tiling:
        rows, columns, height, width = shape[4:]
        return Tiling(rows, columns, height, width)


@lru_cache(maxsize=4096)
def choose_tiling(sides: Sides, max_crops: int) -> Tiling:
    """The tiling that enlarges the image least, or shrinks it least where all of them shrink it.

    All in float32, as published: exact arithmetic would choose otherwise where two tilings nearly tie, and some images
    would be a pixel larger.
    """
    require(max_crops >= 1, "The number of crops of a tier", max_crops, "1 or more for MolmoE")
    candidates = sorted(
        ((rows, columns) for rows in range(1, max_crops + 1) for columns in range(1, max_crops // rows + 1)),
        key=lambda tiles: (tiles[0] * tiles[1], tiles[0]),
    )
    windows = np.array(candidates, np.float32) * _WINDOW
    with np.errstate(divide="ignore", invalid="ignore"):
        scales = (windows / np.array([side - _MARGIN for side in sides], np.float32)).min(1)
    index = scales.argmax() if (scales < 1).all() else np.where(scales < 1, np.float32(1e10), scales).argmin()
    rows, columns = candidates[index]
    height, width = _fit(sides, (_WINDOW * rows + _MARGIN, _WINDOW * columns + _MARGIN))
    return Tiling(rows, columns, height, width)


def longest_tiling(max_crops: int) -> Tiling:
    """The one that becomes most tokens, of an image that fills it."""
    tiling = Tiling(max_crops, 1, 0, 0)
    return Tiling(max_crops, 1, *tiling.canvas)


def _fit(sides: Sides, canvas: Sides) -> Sides:
    """Height and width in the same ratio that fit the canvas; fractions are cut off."""
    scale = (np.array(canvas, np.float32) / np.array(sides, np.float32)).min()
    height, width = (int(np.float32(side) * scale) for side in sides)
    if not height or not width:
        raise UserError(
            f"An image of {sides[1]} x {sides[0]} pixels is too narrow: fitted into {canvas[1]} x {canvas[0]} it would"
            " have no pixels in one direction. Cut it, or take a larger one."
        )
    return height, width


def tile_shapes(sides: Sides, counts: Mapping[str, int]) -> dict[str, CropShape]:
    """The shape of each tier, whose number of crops is an upper limit."""
    return {tier: choose_tiling(sides, count).shape for tier, count in counts.items()}


def tile_by_tier(image: SourceImage, counts: Mapping[str, int], normalization: ImageNormalization) -> LazyCrops:
    """For each tier the overview and the tiles, row by row."""
    shapes = tile_shapes(image.sides, counts)
    colors = cache(lambda: (image.pixels.permute(2, 0, 1).float() / 255)[None])

    @cache
    def overview() -> Tensor:
        sides = (CROP_SIDE, CROP_SIDE)
        return _place(colors(), _fit(image.sides, sides), sides, normalization)

    @cache
    def cut(tier: str) -> Tensor:
        tiling = Tiling.of_shape(shapes[tier])
        canvas = _place(colors(), (tiling.height, tiling.width), tiling.canvas, normalization)
        tiles = canvas.unfold(1, CROP_SIDE, _WINDOW).unfold(2, CROP_SIDE, _WINDOW)
        return torch.cat([overview()[None], tiles.permute(1, 2, 0, 3, 4).flatten(0, 1)])

    return LazyCrops(shapes, cut, image.pixels.numel() // 3, overview=overview)


def _place(
    colors: Float[Tensor, "1 3 height width"], size: Sides, canvas: Sides, normalization: ImageNormalization
) -> Float[Tensor, "3 rows columns"]:
    """The image at this size in the middle of a canvas. What surrounds it is black, so it is not 0 in the end."""
    resized = interpolate(colors, size, mode="bilinear", align_corners=False, antialias=True)[0].clamp(0, 1)
    top, left = ((outer - inner) // 2 for outer, inner in zip(canvas, size, strict=True))
    placed = pad(resized, (left, canvas[1] - size[1] - left, top, canvas[0] - size[0] - top))
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (normalization.mean, normalization.std))
    return (placed - mean) / std


def image_masks(tiling: Tiling) -> Float[Tensor, "crops patches"]:
    """The mask of each crop: the share of each of its patches that shows the image.

    The published preprocessing puts the overview before the tiles but its mask after theirs. So the overview has the
    mask of the first tile, each tile that of the next one, and the last tile -1. The weights were trained so.
    """
    rows, columns = (
        _shown_share(canvas, side) for canvas, side in zip(tiling.canvas, (tiling.height, tiling.width), strict=True)
    )
    step = _WINDOW // PATCH_SIDE
    tiles = torch.outer(rows, columns).unfold(0, _PATCHES, step).unfold(1, _PATCHES, step)
    return pad(tiles.reshape(-1, _PATCHES**2), (0, 0, 0, 1), value=_NO_TILE)


def _shown_share(canvas: int, side: int) -> Float[Tensor, " patches"]:
    """Of each patch of the canvas in one direction."""
    start = (canvas - side) // 2
    first = torch.arange(0, canvas, PATCH_SIDE)
    shown = (first + PATCH_SIDE).clamp(max=start + side) - first.clamp(min=start)
    return shown.clamp(min=0) / PATCH_SIDE


@lru_cache(maxsize=256)
def feature_order(rows: int, columns: int) -> Int64[Tensor, " features"]:
    """The features that a prompt shows, in its order, as indices of the flattened features of all crops.

    All of the overview; of the tiles those that lie nearer to their own middle than to a neighbor's.
    """
    overview = torch.arange(POOLED**2)
    tile_rows, within_rows = _nearest_tile(rows)
    tile_columns, within_columns = _nearest_tile(columns)
    tiles = 1 + tile_rows[:, None] * columns + tile_columns
    cells = within_rows[:, None] * POOLED + within_columns
    return torch.cat([overview, (tiles * POOLED**2 + cells).flatten()])


def _nearest_tile(tiles: int) -> tuple[Int64[Tensor, " cells"], Int64[Tensor, " cells"]]:
    """For each cell of the grid in one direction: the tile that shows it, and the cell's index in that tile."""
    cells = torch.arange(POOLED_WINDOW * tiles + 2 * POOLED_OVERLAP)
    tile = ((cells - POOLED_OVERLAP) // POOLED_WINDOW).clamp(0, tiles - 1)
    return tile, cells - POOLED_WINDOW * tile


@lru_cache(maxsize=256)
def token_layout(
    rows: int, columns: int, ids: tuple[int, int, int, int]
) -> tuple[Int64[Tensor, " tokens"], Int64[Tensor, " features"]]:
    """The image's tokens, and the positions of patches among them. `ids`: of start, end, patch and end of a row."""
    start, end, patch, column = ids
    tokens = []
    for height, width in ((POOLED, POOLED), feature_grid(rows, columns)):
        tokens += [start, *([patch] * width + [column]) * height, end]
    layout = torch.tensor(tokens)
    return layout, (layout == patch).nonzero()[:, 0]
