"""Images for the vision towers: opened, cropped or resized for every tier, and normalized."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor

from groupwise.core.errors import UserError

_MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class ImageNormalization:
    """(value - mean) / std for each color, with values from 0 to 1, as the vision tower was trained with."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def open_image(image: Path | str | Image.Image) -> Image.Image:
    """An RGB image, rotated as its EXIF data says."""
    if not isinstance(image, Image.Image):
        image = read_image(Path(image))
    return ImageOps.exif_transpose(image).convert("RGB")


def read_image(path: Path) -> Image.Image:
    """An image as its file has it; a missing or damaged file is refused."""
    if not path.is_file():
        raise UserError(f"There is no image file {path}. Check the path.")
    try:
        with Image.open(path) as opened:
            opened.load()
            return opened
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path} cannot be read as an image ({error}). The file is damaged or of an unknown format: open it in a"
            " viewer and save it again as PNG or JPEG."
        ) from error


def crop_by_tier(
    image: Image.Image, counts: Mapping[str, int], *, side: int, patch: int, normalization: ImageNormalization
) -> dict[str, Float[Tensor, "crops 3 side side"]]:
    """For every tier the overview and its number of crops, all of them `side` pixels wide and high.

    The crops are a grid over the whole image, the one whose cells are nearest to squares: 12 are 3 rows of 4 on a 4:3
    image, 6 x 2 on a tall one. Every crop must have at least one patch of pixels.
    """
    overview = _normalize(image.resize((side, side), Image.Resampling.BICUBIC), normalization)[None]
    tiers = {}
    for tier, count in counts.items():
        rows, columns = best_grid(count, image.height, image.width)
        if image.height < rows * patch or image.width < columns * patch:
            raise UserError(
                f"An image of {image.width} x {image.height} pixels is too small for {count} crops at tier {tier!r}:"
                f" {columns} x {rows} crops of at least {patch} x {patch} need {columns * patch} x {rows * patch}. Take"
                " a larger image."
            )
        cells = [cell.resize((side, side), Image.Resampling.BICUBIC) for cell in _grid_cells(image, rows, columns)]
        tiers[tier] = torch.cat([overview, torch.stack([_normalize(cell, normalization) for cell in cells])])
    return tiers


def _grid_cells(image: Image.Image, rows: int, columns: int) -> list[Image.Image]:
    """Row by row; every pixel is in exactly one cell."""
    across = [round(image.width * x / columns) for x in range(columns + 1)]
    down = [round(image.height * y / rows) for y in range(rows + 1)]
    return [
        image.crop((left, top, right, bottom)) for top, bottom in pairwise(down) for left, right in pairwise(across)
    ]


def best_grid(count: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of `count` cells that are nearest to squares on an image of this size."""
    grids = [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
    return min(grids, key=lambda grid: abs(math.log((width / grid[1]) / (height / grid[0]))))


def resize_by_tier(
    image: Image.Image, pixels: Mapping[str, int], *, multiple: int, normalization: ImageNormalization
) -> dict[str, Float[Tensor, "1 3 height width"]]:
    """The image at every tier's number of pixels or just below. Its sides are multiples of a token's side."""
    longest, shortest = max(image.size), min(image.size)
    if shortest < multiple or longest > _MAX_ASPECT_RATIO * shortest:
        raise UserError(
            f"An image of {image.width} x {image.height} pixels is too small: each side needs at least {multiple}, and"
            f" the longer one at most {_MAX_ASPECT_RATIO} times the shorter. Take a larger image."
        )
    tiers = {}
    for tier, max_pixels in pixels.items():
        height, width = resized_shape(max_pixels, image.height, image.width, multiple)
        resized = image.resize((width, height), Image.Resampling.BICUBIC)
        tiers[tier] = _normalize(resized, normalization)[None]
    return tiers


def resized_shape(pixels: int, height: int, width: int, multiple: int) -> tuple[int, int]:
    """Height and width of at most this many pixels, in the same ratio, as multiples; at least one multiple each."""
    shrink = math.sqrt(height * width / pixels)
    return (
        max(multiple, math.floor(height / shrink / multiple) * multiple),
        max(multiple, math.floor(width / shrink / multiple) * multiple),
    )


def _normalize(image: Image.Image, normalization: ImageNormalization) -> Float[Tensor, "3 height width"]:
    raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    values = raw.view(image.height, image.width, 3).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (normalization.mean, normalization.std))
    return (values - mean) / std
