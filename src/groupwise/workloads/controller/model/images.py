"""Images for the vision towers: opened with as many pixels as are needed, and cut for a tier when it is read."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

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
_FORMATS = ("PNG", "JPEG", "MPO", "JPEG2000", "GIF", "WEBP", "BMP", "TIFF", "PPM")
"""Not all that Pillow knows: for EPS it runs Ghostscript, a program, on the file."""
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, TypeError, OverflowError, IndexError, KeyError, struct.error)
"""What Pillow raises for a damaged file."""
_SPARE = 2
"""How many times the sides of the finest tier are kept when an image is shrunk."""
CropShape = tuple[int, ...]
"""Crops, channels, height and width of a tier; then what else the number of its tokens depends on."""
Sides = tuple[int, int]
"""Height and width."""
Grid = tuple[int, int]
"""Rows and columns of crops."""
GridChoice = Callable[[int, int, int], Grid]
"""Of so many crops, for an image of a height and width."""
PixelArray = np.ndarray[Any, Any]
ImageInput = Path | str | bytes | BytesIO | Image.Image | Tensor | PixelArray
"""A file, its bytes, a PIL image, or pixels: height x width, or height x width x 1, 3 or 4 colors."""
_CHANNELS = (1, 3, 4)


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


def open_image(
    image: ImageInput, finest: Callable[[Sides], Sides] | None = None, *, exif_orientation: bool = True
) -> SourceImage:
    """An RGB image, rotated as its EXIF data says unless that is to be ignored; what is no image is refused.

    `finest` tells how high and wide an image of given sides is in the finest tier. A much larger image is shrunk at
    once, by the largest whole factor that leaves twice these sides: then resampling the rest hides what was averaged.
    JPEG files are shrunk while they are decoded.
    """
    image = check_image(image)
    if isinstance(image, np.ndarray):
        image = _image_of_pixels(image)
    if isinstance(image, Image.Image):
        with _readable_errors("The image"):
            return _as_source(image, finest, exif_orientation=exif_orientation)
    with _opened(image) as opened:
        return _as_source(opened, finest, exif_orientation=exif_orientation, may_shrink_file=True)


def read_image(image: Path | BytesIO) -> Image.Image:
    """An image as its file has it; a missing or damaged file is refused."""
    with _opened(image) as opened:
        opened.load()
        return opened


def check_image(image: Any) -> Path | BytesIO | Image.Image | PixelArray:
    """The image as a path, an open file, a PIL image or pixels of 0 to 255; anything else is refused."""
    if isinstance(image, str | Path):
        return Path(image)
    if isinstance(image, bytes | bytearray | memoryview):
        return BytesIO(image)
    if isinstance(image, BytesIO | Image.Image):
        return image
    if isinstance(image, Tensor):
        image = image.detach().cpu().float().numpy() if image.is_floating_point() else image.cpu().numpy()
    if isinstance(image, np.ndarray):
        return _check_pixels(image)
    given = "None" if image is None else f"of type {type(image).__name__}"
    raise UserError(
        f"The image is {given}: give one image, as a path, the bytes of a file, a PIL image, or an array of height x"
        " width x 3. Several images go to generate_batch(), one per request."
    )


def _check_pixels(pixels: np.ndarray[Any, Any]) -> PixelArray:
    """Bytes as they are; floats of 0 to 1 become bytes."""
    is_image = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in _CHANNELS)
    if not is_image or 0 in pixels.shape:
        raise UserError(
            f"The image is an array of shape {pixels.shape}: it must be height x width, or height x width x 1, 3 or 4."
            " Bring the channels of an array to its end, as with transpose(1, 2, 0)."
        )
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == bool:
        return pixels.astype(np.uint8) * 255
    low, high = float(pixels.min()), float(pixels.max())
    if pixels.dtype.kind == "f" and low >= 0 and high <= 1:
        return (pixels * 255).round().astype(np.uint8)
    raise UserError(
        f"The image is an array of {pixels.dtype} with values from {low:g} to {high:g}: floats must be from 0 to 1, and"
        " values from 0 to 255 must be of the type uint8. Divide by 255, or convert it with astype('uint8')."
    )


def _image_of_pixels(pixels: PixelArray) -> Image.Image:
    return Image.fromarray(pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)


@contextmanager
def _opened(file: Path | BytesIO) -> Iterator[Image.Image]:
    if isinstance(file, BytesIO):
        file.seek(0)
    elif not file.is_file():
        raise UserError(f"There is no image file {file}. Check the path.")
    name = "The image" if isinstance(file, BytesIO) else str(file)
    with _readable_errors(name), Image.open(file, formats=_FORMATS) as opened:
        yield opened


@contextmanager
def _readable_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Image.DecompressionBombError as error:
        raise UserError(
            f"{name} is refused: {' '.join(str(error).split())} A small file may claim so many pixels to exhaust the"
            " memory. Shrink an image that is meant to be so large, or raise PIL.Image.MAX_IMAGE_PIXELS."
        ) from error
    except _BROKEN as error:
        raise UserError(
            f"{name} cannot be read as an image ({error}). It is damaged or of an unknown format: open it in a viewer"
            " and save it again as PNG or JPEG."
        ) from error


def _as_source(
    image: Image.Image,
    finest: Callable[[Sides], Sides] | None,
    *,
    exif_orientation: bool,
    may_shrink_file: bool = False,
) -> SourceImage:
    orientation = _orientation(image) if exif_orientation else 1
    is_sideways = orientation >= _FIRST_SIDEWAYS_ORIENTATION
    sides = image.size if is_sideways else image.size[::-1]
    if 0 in sides:
        raise UserError(f"The image has {image.width} x {image.height} pixels. Take one that shows something.")
    if finest is not None:
        height, width = (_SPARE * side for side in (finest(sides)[::-1] if is_sideways else finest(sides)))
        if may_shrink_file:
            image.draft(None, (width, height))
        image = image if image.mode == "RGB" else image.convert("RGB")
        factor = min(image.width // width, image.height // height)
        image = image.reduce(factor) if factor > 1 else image
    image = image if image.mode == "RGB" else image.convert("RGB")
    if orientation != 1:
        image = ImageOps.exif_transpose(image)
    return SourceImage(torch.from_numpy(np.array(image)), sides)


def _orientation(image: Image.Image) -> int:
    return int(image.getexif().get(ExifTags.Base.Orientation, 1))


def best_grid(count: int, height: int, width: int, grids: Sequence[Grid] | None = None) -> Grid:
    """Rows and columns of `count` cells, of these if some are given, that are nearest to squares on such an image."""
    grids = grids or [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
    return min(grids, key=lambda grid: abs(math.log((width / grid[1]) / (height / grid[0]))))


def grid_shapes(
    sides: Sides, counts: Mapping[str, int], *, side: int, patch: int, grid_of: GridChoice = best_grid
) -> dict[str, CropShape]:
    """The overview and the crops of each tier, all `side` pixels high and wide.

    Each crop must have at least one patch of pixels.
    """
    height, width = sides
    for tier, count in counts.items():
        rows, columns = grid_of(count, height, width)
        if height < rows * patch or width < columns * patch:
            raise UserError(
                f"An image of {width} x {height} pixels is too small for {count} crops at tier {tier!r}:"
                f" {columns} x {rows} crops of at least {patch} x {patch} need {columns * patch} x {rows * patch}. Take"
                " a larger image."
            )
    return {tier: (1 + count, 3, side, side) for tier, count in counts.items()}


def largest_grid(sides: Sides, counts: Iterable[int], *, side: int, grid_of: GridChoice = best_grid) -> Sides:
    """Height and width of all crops together at the tier that has most of them in each direction."""
    grids = [grid_of(count, *sides) for count in counts]
    return side * max(rows for rows, _ in grids), side * max(columns for _, columns in grids)


def crop_by_tier(
    image: SourceImage,
    counts: Mapping[str, int],
    *,
    side: int,
    patch: int,
    normalization: ImageNormalization,
    grid_of: GridChoice = best_grid,
) -> LazyCrops:
    """For each tier the overview and its number of crops.

    The crops are a grid over the whole image, the one whose cells are nearest to squares: 12 are 3 rows of 4 on a 4:3
    image, 6 x 2 on a tall one.
    """
    shapes = grid_shapes(image.sides, counts, side=side, patch=patch, grid_of=grid_of)
    overview = cache(lambda: _resize([image.pixels], (side, side)))

    @cache
    def cut(tier: str) -> Tensor:
        cells = _grid_cells(image.pixels, *grid_of(counts[tier], *image.sides))
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
