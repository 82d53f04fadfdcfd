"""Handwriting for the mosaics: scikit-learn's digits, split so that no image is in two splits."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

TILE_PIXELS = 12
# A digit of 8 x 8 pixels fills this share of its tile's side before any jitter.
DIGIT_SHARE = 10 / 12
_SPLIT_SEED = 20
_TRAIN_IMAGES = 1250
_VALIDATION_IMAGES = 247


class Split(StrEnum):
    """The three disjoint sets of handwriting."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True)
class Handwriting:
    """Images of single digits in [0, 1], what they show, and their index in scikit-learn's data set."""

    images: Float[Tensor, "images 8 8"]
    labels: Int[np.ndarray, " images"]
    source_rows: Int[np.ndarray, " images"]


def load_handwriting(split: Split) -> Handwriting:
    """Return the images of one split; the same ones at every call."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = _rows_of(split, len(digits.target))
    images = torch.tensor(digits.images[rows] / 16.0, dtype=torch.float32)
    return Handwriting(images=images, labels=np.asarray(digits.target)[rows].astype(np.int64), source_rows=rows)


def _rows_of(split: Split, total: int) -> Int[np.ndarray, " images"]:
    order = np.random.default_rng(_SPLIT_SEED).permutation(total)
    bounds = {
        Split.TRAIN: (0, _TRAIN_IMAGES),
        Split.VALIDATION: (_TRAIN_IMAGES, _TRAIN_IMAGES + _VALIDATION_IMAGES),
        Split.TEST: (_TRAIN_IMAGES + _VALIDATION_IMAGES, total),
    }
    first, end = bounds[split]
    return order[first:end]


@dataclass(frozen=True)
class Jitter:
    """How far a digit may be moved, turned, scaled and slanted inside its tile."""

    shift: float = 0.06
    turn_radians: float = 0.0
    scale: float = 0.0
    slant: float = 0.0


TRAIN_JITTER = Jitter(shift=0.1, turn_radians=0.15, scale=0.08, slant=0.1)
PLAIN_JITTER = Jitter()


def draw_tiles(
    images: Float[Tensor, "tiles 8 8"], jitter: Jitter, rng: np.random.Generator
) -> Float[Tensor, "tiles side side"]:
    """Place each digit into a tile of its own, moved a little as `jitter` allows."""
    count = images.shape[0]

    def spread(width: float) -> Tensor:
        return torch.from_numpy(rng.uniform(-width, width, count)).float()

    turn, slant = spread(jitter.turn_radians), spread(jitter.slant)
    zoom = 1.0 / (DIGIT_SHARE * (1.0 + spread(jitter.scale)))
    across = torch.stack([zoom * torch.cos(turn), -zoom * torch.sin(turn) + slant, spread(jitter.shift)], dim=1)
    down = torch.stack([zoom * torch.sin(turn), zoom * torch.cos(turn), spread(jitter.shift)], dim=1)
    grid = functional.affine_grid(
        torch.stack([across, down], dim=1), [count, 1, TILE_PIXELS, TILE_PIXELS], align_corners=False
    )
    return functional.grid_sample(images[:, None], grid, align_corners=False)[:, 0]
