"""Pictures for the vision towers: opened with care, cut into crops or resized, and normalized."""

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

_LONGEST_TO_SHORTEST = 200


@dataclass(frozen=True)
class ImageNormalization:
    """What a vision tower was trained with: (brightness - mean) / std, for each color; brightness from 0 to 1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def open_image(image: Path | str | Image.Image) -> Image.Image:
    """A picture in red, green and blue, turned as its camera says."""
    if not isinstance(image, Image.Image):
        image = read_image(Path(image))
    return ImageOps.exif_transpose(image).convert("RGB")


def read_image(path: Path) -> Image.Image:
    """A picture as its file has it; refused if there is none or it is damaged."""
    if not path.is_file():
        raise UserError(f"There is no image file {path}. Check the path.")
    try:
        with Image.open(path) as opened:
            opened.load()
            return opened
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as fault:
        raise UserError(
            f"{path} cannot be read as an image ({fault}). The file is damaged or of an unknown kind: open it in a"
            " viewer and save it again as PNG or JPEG."
        ) from fault


def crops_by_tier(
    image: Image.Image, counts: Mapping[str, int], side: int, patch: int, statistics: ImageNormalization
) -> dict[str, Float[Tensor, "crops 3 side side"]]:
    """The overview and, for every tier, its number of parts, all of them `side` pixels wide and high.

    The parts are a grid over the whole picture, the one whose cells come nearest to squares: 12 are 3 rows of 4 on a
    4:3 picture, 6 x 2 on a tall one. Every part must have a patch's worth of pixels of its own.
    """
    overview = _normalized(image.resize((side, side), Image.Resampling.BICUBIC), statistics)[None]
    tiers = {}
    for tier, count in counts.items():
        rows, columns = best_grid(count, image.height, image.width)
        if image.height < rows * patch or image.width < columns * patch:
            raise UserError(
                f"An image of {image.width} x {image.height} pixels has not enough of them for {count} crops at tier"
                f" {tier!r}: {columns} x {rows} crops of at least {patch} x {patch} need {columns * patch} x"
                f" {rows * patch}. Take a larger image."
            )
        parts = [part.resize((side, side), Image.Resampling.BICUBIC) for part in _grid_cells(image, rows, columns)]
        tiers[tier] = torch.cat([overview, torch.stack([_normalized(part, statistics) for part in parts])])
    return tiers


def _grid_cells(image: Image.Image, rows: int, columns: int) -> list[Image.Image]:
    """Row by row; no pixel is left out or taken twice."""
    across = [round(image.width * x / columns) for x in range(columns + 1)]
    down = [round(image.height * y / rows) for y in range(rows + 1)]
    return [
        image.crop((left, top, right, bottom)) for top, bottom in pairwise(down) for left, right in pairwise(across)
    ]


def best_grid(count: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of `count` cells that are as square as can be on a picture of this size."""
    grids = [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
    return min(grids, key=lambda grid: abs(math.log((width / grid[1]) / (height / grid[0]))))


def images_by_tier(
    image: Image.Image, pixels: Mapping[str, int], multiple: int, statistics: ImageNormalization
) -> dict[str, Float[Tensor, "1 3 height width"]]:
    """The picture at every tier's number of pixels, or just below: its sides are multiples of what becomes a token."""
    longest, shortest = max(image.size), min(image.size)
    if shortest < multiple or longest > _LONGEST_TO_SHORTEST * shortest:
        raise UserError(
            f"An image of {image.width} x {image.height} pixels has not enough of them: each side needs at least"
            f" {multiple}, and the longer one at most {_LONGEST_TO_SHORTEST} times the shorter. Take a larger image."
        )
    tiers = {}
    for tier, most in pixels.items():
        height, width = resized_shape(most, image.height, image.width, multiple)
        resized = image.resize((width, height), Image.Resampling.BICUBIC)
        tiers[tier] = _normalized(resized, statistics)[None]
    return tiers


def resized_shape(pixels: int, height: int, width: int, multiple: int) -> tuple[int, int]:
    """Height and width of at most this many pixels, of the same shape, as multiples; never less than one multiple."""
    shrink = math.sqrt(height * width / pixels)
    return (
        max(multiple, math.floor(height / shrink / multiple) * multiple),
        max(multiple, math.floor(width / shrink / multiple) * multiple),
    )


def _normalized(image: Image.Image, statistics: ImageNormalization) -> Float[Tensor, "3 height width"]:
    raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    brightness = raw.view(image.height, image.width, 3).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (statistics.mean, statistics.std))
    return (brightness - mean) / std
