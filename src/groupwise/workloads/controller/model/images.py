"""Images for the vision towers: opened with as many pixels as are needed, and cut for a tier when it is read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import ExifTags, Image, ImageOps
from torch import Tensor
from torch.nn.functional import interpolate

from groupwise.core.errors import UserError
from groupwise.workloads.controller.config import OVERVIEW_SIDE

_MAX_ASPECT_RATIO = 200
_FIRST_SIDEWAYS_ORIENTATION = 5
_SPARE = 2
"""How many times the sides of the finest tier are kept when an image is shrunk."""
CropShape = tuple[int, ...]
"""Crops, channels, height and width of a tier; then what else the number of its tokens depends on."""
Sides = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class ImageNormalization:
    """(value - mean) / std for each color, with values from 0 to 1, as the vision tower was trained with."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True)
class SourceImage:
    """An opened image."""

    pixels: UInt8[Tensor, "rows columns 3"]
    """All of them, or fewer where the finest tier shows fewer."""
    sides: Sides
    """Of the whole image."""


class LazyCrops(Mapping[str, Tensor]):
    """The crops of each tier. A tier is cut when it is read; its shape is known before.

    `overview` gives the whole image as one normalized crop, without cutting any tier.
    """

    def __init__(
        self,
        shapes: Mapping[str, CropShape],
        cut: Callable[[str], Tensor],
        source_pixels: int = 0,
        *,
        overview: Callable[[], Float[Tensor, "3 height width"]] | None = None,
    ):
        self.shapes, self._cut, self._source_pixels, self.overview = shapes, cut, source_pixels, overview
        self.cut_ms = 0.0
        """Time spent on cutting so far."""

    def __getitem__(self, tier: str) -> Tensor:
        started = time.perf_counter()
        crops = self._cut(tier)
        self.cut_ms += 1000 * (time.perf_counter() - started)
        return crops

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def work(self, tier: str) -> float:
        """What cutting a tier is proportional to: millions of pixels that are read and written."""
        crops, _, height, width = self.shapes[tier][:4]
        return (self._source_pixels + crops * height * width) / 1e6


def crop_shapes(crops_by_tier: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
    """The shape of each tier, without cutting any."""
    if isinstance(crops_by_tier, LazyCrops):
        return crops_by_tier.shapes
    return {tier: tuple(pixels.shape) for tier, pixels in crops_by_tier.items()}


def open_image(image: Path | str | Image.Image, finest: Callable[[Sides], Sides] | None = None) -> SourceImage:
    """An RGB image, rotated as its EXIF data says; a missing or damaged file is refused.

    `finest` tells how high and wide an image of given sides is in the finest tier. A much larger image is shrunk at
    once, by the largest whole factor that leaves twice these sides: then resampling the rest hides what was averaged.
    JPEG files are shrunk while they are decoded.
    """
    if isinstance(image, Image.Image):
        return _as_source(image, _upright_sides(image), finest)
    with _opened_file(Path(image)) as opened:
        sides = _upright_sides(opened)
        if finest is not None:
            opened.draft(None, _enough(opened, finest(sides)))
        return _as_source(opened, sides, finest)


def read_image(path: Path) -> Image.Image:
    """An image as its file has it; a missing or damaged file is refused."""
    with _opened_file(path) as opened:
        opened.load()
        return opened


@contextmanager
def _opened_file(path: Path) -> Iterator[Image.Image]:
    if not path.is_file():
        raise UserError(f"There is no image file {path}. Check the path.")
    try:
        with Image.open(path) as opened:
            yield opened
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path} cannot be read as an image ({error}). The file is damaged or of an unknown format: open it in a"
            " viewer and save it again as PNG or JPEG."
        ) from error


def _as_source(image: Image.Image, sides: Sides, finest: Callable[[Sides], Sides] | None) -> SourceImage:
    image = image if image.mode == "RGB" else image.convert("RGB")
    if finest is not None:
        width, height = _enough(image, finest(sides))
        factor = min(image.width // width, image.height // height)
        image = image.reduce(factor) if factor > 1 else image
    if _orientation(image) != 1:
        image = ImageOps.exif_transpose(image)
    return SourceImage(torch.from_numpy(np.array(image)), sides)


def _orientation(image: Image.Image) -> int:
    return int(image.getexif().get(ExifTags.Base.Orientation, 1))


def _upright_sides(image: Image.Image) -> Sides:
    return image.size if _orientation(image) >= _FIRST_SIDEWAYS_ORIENTATION else image.size[::-1]


def _enough(image: Image.Image, finest: Sides) -> tuple[int, int]:
    """The width and height, before it is rotated, that an image needs for these upright sides in the finest tier."""
    height, width = finest[::-1] if _orientation(image) >= _FIRST_SIDEWAYS_ORIENTATION else finest
    return _SPARE * width, _SPARE * height


def grid_shapes(sides: Sides, counts: Mapping[str, int], *, side: int, patch: int) -> dict[str, CropShape]:
    """The overview and the crops of each tier, all `side` pixels high and wide.

    Each crop must have at least one patch of pixels.
    """
    height, width = sides
    for tier, count in counts.items():
        rows, columns = best_grid(count, height, width)
        if height < rows * patch or width < columns * patch:
            raise UserError(
                f"An image of {width} x {height} pixels is too small for {count} crops at tier {tier!r}:"
                f" {columns} x {rows} crops of at least {patch} x {patch} need {columns * patch} x {rows * patch}. Take"
                " a larger image."
            )
    return {tier: (1 + count, 3, side, side) for tier, count in counts.items()}


def largest_grid(sides: Sides, counts: Iterable[int], *, side: int) -> Sides:
    """Height and width of all crops together at the tier that has most of them in each direction."""
    grids = [best_grid(count, *sides) for count in counts]
    return side * max(rows for rows, _ in grids), side * max(columns for _, columns in grids)


def crop_by_tier(
    image: SourceImage, counts: Mapping[str, int], *, side: int, patch: int, normalization: ImageNormalization
) -> LazyCrops:
    """For each tier the overview and its number of crops.

    The crops are a grid over the whole image, the one whose cells are nearest to squares: 12 are 3 rows of 4 on a 4:3
    image, 6 x 2 on a tall one.
    """
    shapes = grid_shapes(image.sides, counts, side=side, patch=patch)
    overview = cache(lambda: _resize([image.pixels], (side, side)))

    @cache
    def cut(tier: str) -> Tensor:
        cells = _grid_cells(image.pixels, *best_grid(counts[tier], *image.sides))
        return _normalize(torch.cat([overview(), _resize(cells, (side, side))]), normalization)

    def whole() -> Tensor:
        return _normalize(overview(), normalization)[0]

    return LazyCrops(shapes, cut, image.pixels.numel() // 3, overview=whole)


def _grid_cells(pixels: UInt8[Tensor, "height width 3"], rows: int, columns: int) -> list[Tensor]:
    """Row by row; every pixel is in exactly one cell."""
    height, width, _ = pixels.shape
    across = [round(width * x / columns) for x in range(columns + 1)]
    down = [round(height * y / rows) for y in range(rows + 1)]
    return [pixels[top:bottom, left:right] for top, bottom in pairwise(down) for left, right in pairwise(across)]


def best_grid(count: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of `count` cells that are nearest to squares on an image of this size."""
    grids = [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
    return min(grids, key=lambda grid: abs(math.log((width / grid[1]) / (height / grid[0]))))


def resized_shapes(sides: Sides, pixels: Mapping[str, int], *, multiple: int) -> dict[str, CropShape]:
    """One image per tier, of its number of pixels or just below. Its sides are multiples of a token's side."""
    longest, shortest = max(sides), min(sides)
    if shortest < multiple or longest > _MAX_ASPECT_RATIO * shortest:
        raise UserError(
            f"An image of {sides[1]} x {sides[0]} pixels is too small: each side needs at least {multiple}, and"
            f" the longer one at most {_MAX_ASPECT_RATIO} times the shorter. Take a larger image."
        )
    return {tier: (1, 3, *resized_shape(most, *sides, multiple)) for tier, most in pixels.items()}


def resize_by_tier(
    image: SourceImage, pixels: Mapping[str, int], *, multiple: int, normalization: ImageNormalization
) -> LazyCrops:
    """The image at each tier's number of pixels or just below."""
    shapes = resized_shapes(image.sides, pixels, multiple=multiple)

    @cache
    def cut(tier: str) -> Tensor:
        _, _, height, width = shapes[tier]
        return _normalize(_resize([image.pixels], (height, width)), normalization)

    def whole() -> Tensor:
        return _normalize(_resize([image.pixels], (OVERVIEW_SIDE, OVERVIEW_SIDE)), normalization)[0]

    return LazyCrops(shapes, cut, image.pixels.numel() // 3, overview=whole)


def resized_shape(pixels: int, height: int, width: int, multiple: int) -> Sides:
    """Height and width of at most this many pixels, in the same ratio, as multiples; at least one multiple each."""
    shrink = math.sqrt(height * width / pixels)
    return (
        max(multiple, math.floor(height / shrink / multiple) * multiple),
        max(multiple, math.floor(width / shrink / multiple) * multiple),
    )


def _resize(cells: Sequence[UInt8[Tensor, "rows columns 3"]], sides: Sides) -> UInt8[Tensor, "cells 3 height width"]:
    """Bicubic with antialiasing, as PIL does it. Cells of equal size, mostly all of them, go in one call."""
    resized = torch.empty(len(cells), 3, *sides, dtype=torch.uint8)
    for size in {cell.shape for cell in cells}:
        rows = [row for row, cell in enumerate(cells) if cell.shape == size]
        same = torch.stack([cells[row] for row in rows]).permute(0, 3, 1, 2)
        resized[rows] = interpolate(same, sides, mode="bicubic", antialias=True)
    return resized


def _normalize(
    values: UInt8[Tensor, "crops 3 height width"], normalization: ImageNormalization
) -> Float[Tensor, "crops 3 height width"]:
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (normalization.mean, normalization.std))
    return (values / 255 - mean) / std
