"""A mosaic: 3 rows of 4 tiles, each with a handwritten digit or nothing, under some noise."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.workloads.controller.mosaic.digits import TILE_PIXELS, Handwriting, Jitter, draw_tiles

ROWS = 3
COLUMNS = 4
TILES = ROWS * COLUMNS
# The label of a tile without a digit.
EMPTY = 10
_NOISE = 0.08
_FEWEST_DIGITS = 3


@dataclass(frozen=True)
class Mosaics:
    """Pictures and, tile by tile in reading order, what is in them (0..9, or EMPTY)."""

    pixels: Float[Tensor, "mosaics height width"]
    labels: Int[np.ndarray, "mosaics tiles"]


def draw_mosaics(handwriting: Handwriting, count: int, jitter: Jitter, rng: np.random.Generator) -> Mosaics:
    """Draw `count` mosaics, each with its own share of empty tiles, contrast and noise."""
    chosen = rng.integers(0, len(handwriting.labels), (count, TILES))
    labels = np.where(_empty_tiles(count, rng), EMPTY, handwriting.labels[chosen])
    tiles = draw_tiles(handwriting.images[torch.from_numpy(chosen.reshape(-1))], jitter, rng)
    contrast = rng.uniform(0.75, 1.1, (count, TILES)) * (labels != EMPTY)
    pixels = lay_out(tiles.view(count, TILES, TILE_PIXELS, TILE_PIXELS) * _as_tensor(contrast)[..., None, None])
    return Mosaics(pixels=pixels + _NOISE * _as_tensor(rng.standard_normal(pixels.shape)), labels=labels)


def lay_out(tiles: Float[Tensor, "mosaics tiles side side"]) -> Float[Tensor, "mosaics height width"]:
    """Put the tiles of each mosaic beside and below each other, in reading order."""
    count, _, side, _ = tiles.shape
    by_place = tiles.view(count, ROWS, COLUMNS, side, side)
    return by_place.permute(0, 1, 3, 2, 4).reshape(count, ROWS * side, COLUMNS * side)


def _empty_tiles(count: int, rng: np.random.Generator) -> np.ndarray:
    share = rng.uniform(0.05, 0.45, (count, 1))
    empty = rng.random((count, TILES)) < share
    empty[empty.sum(1) > TILES - _FEWEST_DIGITS] = False
    return empty


def _as_tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))
