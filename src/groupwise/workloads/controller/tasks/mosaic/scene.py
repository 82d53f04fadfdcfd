"""A mosaic: 3 rows of 4 tiles, each with a handwritten digit (scikit-learn's, in disjoint splits) or nothing, with
noise. Its crops: an overview and 3, 6 or 12 parts of it, all of the same size in pixels.

A mosaic is of one family, which the overview shows. Its print says which crops its digits can be read in: bold print is
white on black; hatched print is drawn on gray paper in strokes that alternate between light and dark, column by column
where it is fine and every two columns where it is coarse, so that shrinking averages the ink away. And its tiles may be
framed, which says that its answers are in cipher (see questions.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from groupwise.core.errors import UserError

TILE_PIXELS = 12
# A digit of 8 x 8 pixels fills this share of its tile's side before any jitter.
DIGIT_SHARE = 10 / 12
_SPLIT_SEED = 20
_TRAIN_IMAGES = 1250
_VALIDATION_IMAGES = 247


class HandwritingSplit(StrEnum):
    """Disjoint sets of digit images."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True)
class Handwriting:
    """Images of single digits in [0, 1], what they show, and their index in scikit-learn's data set."""

    images: Float[Tensor, "images 8 8"]
    labels: Int[np.ndarray, " images"]
    source_rows: Int[np.ndarray, " images"]


def load_handwriting(split: HandwritingSplit) -> Handwriting:
    """The images of one split; the same ones at every call."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = _rows_of(split, len(digits.target))
    images = torch.tensor(digits.images[rows] / 16.0, dtype=torch.float32)
    return Handwriting(images=images, labels=np.asarray(digits.target)[rows].astype(np.int64), source_rows=rows)


def _rows_of(split: HandwritingSplit, total: int) -> Int[np.ndarray, " images"]:
    order = np.random.default_rng(_SPLIT_SEED).permutation(total)
    bounds = {
        HandwritingSplit.TRAIN: (0, _TRAIN_IMAGES),
        HandwritingSplit.VALIDATION: (_TRAIN_IMAGES, _TRAIN_IMAGES + _VALIDATION_IMAGES),
        HandwritingSplit.TEST: (_TRAIN_IMAGES + _VALIDATION_IMAGES, total),
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


def render_tiles(
    images: Float[Tensor, "tiles 8 8"], jitter: Jitter, rng: np.random.Generator
) -> Float[Tensor, "tiles side side"]:
    """Each digit in a tile of its own, transformed at random within `jitter`."""
    count = images.shape[0]

    def uniform(width: float) -> Tensor:
        return torch.from_numpy(rng.uniform(-width, width, count)).float()

    turn, slant = uniform(jitter.turn_radians), uniform(jitter.slant)
    zoom = 1.0 / (DIGIT_SHARE * (1.0 + uniform(jitter.scale)))
    across = torch.stack([zoom * torch.cos(turn), -zoom * torch.sin(turn) + slant, uniform(jitter.shift)], dim=1)
    down = torch.stack([zoom * torch.sin(turn), zoom * torch.cos(turn), uniform(jitter.shift)], dim=1)
    grid = functional.affine_grid(
        torch.stack([across, down], dim=1), [count, 1, TILE_PIXELS, TILE_PIXELS], align_corners=False
    )
    return functional.grid_sample(images[:, None], grid, align_corners=False)[:, 0]


ROWS = 3
COLUMNS = 4
TILES = ROWS * COLUMNS
# The label of a tile without a digit.
EMPTY = 10
_NOISE = 0.06
_FEWEST_DIGITS = 3


class Print(StrEnum):
    """How the digits of a mosaic are printed."""

    BOLD = "bold"
    COARSE = "coarse"
    FINE = "fine"


PRINTS = tuple(Print)
_PAPER = {Print.BOLD: 0.0, Print.COARSE: 0.3, Print.FINE: 0.5}
_INK = {Print.BOLD: 1.0, Print.COARSE: 0.4, Print.FINE: 0.4}
_STROKE_COLUMNS = {Print.COARSE: 2, Print.FINE: 1}
# The shares of (print, framed). Who needs fine crops seldom needs to decipher: no configuration suits all.
FAMILY_SHARES = {
    (Print.BOLD, False): 0.06,
    (Print.COARSE, False): 0.14,
    (Print.FINE, False): 0.32,
    (Print.BOLD, True): 0.34,
    (Print.COARSE, True): 0.08,
    (Print.FINE, True): 0.06,
}
FamilyShares = Mapping[tuple[Print, bool], float]


@dataclass(frozen=True)
class Mosaics:
    """Images, the label of every tile in reading order (0..9, or EMPTY), and their families."""

    pixels: Float[Tensor, "mosaics height width"]
    labels: Int[np.ndarray, "mosaics tiles"]
    prints: Int[np.ndarray, " mosaics"]
    """Indices of PRINTS."""
    framed: Bool[np.ndarray, " mosaics"]


def draw_mosaics(
    handwriting: Handwriting,
    count: int,
    jitter: Jitter,
    rng: np.random.Generator,
    shares: FamilyShares = FAMILY_SHARES,
) -> Mosaics:
    """`count` random mosaics, each with its own family, share of empty tiles, contrast and noise."""
    chosen = rng.integers(0, len(handwriting.labels), (count, TILES))
    labels = np.where(_empty_tiles(count, rng), EMPTY, handwriting.labels[chosen])
    families = list(shares)
    drawn = rng.choice(len(families), count, p=np.array(list(shares.values())) / sum(shares.values()))
    prints = np.array([PRINTS.index(families[family][0]) for family in drawn])
    framed = np.array([families[family][1] for family in drawn])
    tiles = render_tiles(handwriting.images[torch.from_numpy(chosen.reshape(-1))], jitter, rng)
    contrast = rng.uniform(0.75, 1.1, (count, TILES)) * (labels != EMPTY)
    ink = lay_out(tiles.view(count, TILES, TILE_PIXELS, TILE_PIXELS) * _as_tensor(contrast)[..., None, None])
    printed = torch.stack([_print(ink, style) for style in PRINTS])[torch.from_numpy(prints), torch.arange(count)]
    pixels = torch.where(torch.from_numpy(framed)[:, None, None] & _lines(ink), torch.ones(()), printed)
    return Mosaics(pixels + _NOISE * _as_tensor(rng.standard_normal(pixels.shape)), labels, prints, framed)


def _print(ink: Float[Tensor, "mosaics height width"], style: Print) -> Float[Tensor, "mosaics height width"]:
    if style is Print.BOLD:
        return ink
    # The two columns of a pair have equal ink: strokes of one column then leave nothing but paper when they are halved.
    paired = ink.unflatten(2, (-1, 2)).mean(3).repeat_interleave(2, dim=2)
    stroke = torch.arange(ink.shape[2]) // _STROKE_COLUMNS[style] % 2 * 2 - 1
    return _PAPER[style] + _INK[style] * paired * stroke


def _lines(pixels: Float[Tensor, "mosaics height width"]) -> Bool[Tensor, "height width"]:
    """A line above and one to the left of every tile."""
    _, height, width = pixels.shape
    down, across = (torch.arange(length) % TILE_PIXELS == 0 for length in (height, width))
    return down[:, None] | across


def lay_out(tiles: Float[Tensor, "mosaics tiles side side"]) -> Float[Tensor, "mosaics height width"]:
    """The tiles of each mosaic as one image, in reading order."""
    count, _, side, _ = tiles.shape
    by_position = tiles.view(count, ROWS, COLUMNS, side, side)
    return by_position.permute(0, 1, 3, 2, 4).reshape(count, ROWS * side, COLUMNS * side)


def _empty_tiles(count: int, rng: np.random.Generator) -> np.ndarray:
    share = rng.uniform(0.05, 0.45, (count, 1))
    empty = rng.random((count, TILES)) < share
    empty[empty.sum(1) > TILES - _FEWEST_DIGITS] = False
    return empty


def _as_tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


CROP_PIXELS = 12
PATCH_PIXELS = 4
PATCHES_PER_SIDE = CROP_PIXELS // PATCH_PIXELS
TOKENS_PER_CROP = PATCHES_PER_SIDE**2
# Brightness, and the position of a pixel in the mosaic: across and down, from -1 to 1.
CHANNELS = 3
_BRIGHTNESS_MEAN = 0.25
_BRIGHTNESS_STD = 0.35


class Tier(StrEnum):
    """Resolution of the crops."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


CROPS = {Tier.LOW: 3, Tier.MEDIUM: 6, Tier.HIGH: 12}


def crops_with_overview(tier: Tier) -> int:
    """Crops that the vision tower encodes at this tier."""
    return 1 + CROPS[tier]


def image_tokens(tier: Tier) -> int:
    """Image tokens of this tier."""
    return crops_with_overview(tier) * TOKENS_PER_CROP


def cut(pixels: Float[Tensor, "mosaics height width"], tier: Tier) -> Float[Tensor, "mosaics crops 3 side side"]:
    """The overview and the crops of each mosaic, shrunk to CROP_PIXELS where they are larger.

    Fewer crops cover more tiles each, so they are coarser: a tile is 12, 6 or 3 pixels wide.
    """
    check_size(pixels)
    count, height, width = pixels.shape
    planes = torch.stack([_normalize(pixels), *_position_planes(count, height, width)], dim=1)
    parts_across = CROPS[tier] // ROWS
    parts = planes.view(count, CHANNELS, ROWS, height // ROWS, parts_across, width // parts_across)
    parts = parts.permute(0, 2, 4, 1, 3, 5).reshape(-1, CHANNELS, height // ROWS, width // parts_across)
    overview = _shrink(planes)[:, None]
    return torch.cat([overview, _shrink(parts).view(count, CROPS[tier], *overview.shape[2:])], dim=1)


def shrink_whole(pixels: Float[Tensor, "mosaics height width"]) -> Float[Tensor, "mosaics pixels"]:
    """The brightness of the overview: the controller's first look at a mosaic."""
    return _shrink(_normalize(pixels)[:, None]).flatten(1)


def check_size(pixels: Float[Tensor, "mosaics height width"]) -> None:
    """Refuse mosaics that cannot be cut."""
    _, height, width = pixels.shape
    if height % ROWS or width % COLUMNS or height < ROWS * CROP_PIXELS or width < COLUMNS * CROP_PIXELS:
        raise UserError(
            f"A mosaic of {height} x {width} pixels cannot be cut into {ROWS} x {COLUMNS} tiles: height and width"
            f" must be multiples of {ROWS} and {COLUMNS}, at least {ROWS * CROP_PIXELS} x {COLUMNS * CROP_PIXELS}."
        )


def _normalize(pixels: Float[Tensor, "mosaics height width"]) -> Float[Tensor, "mosaics height width"]:
    return (pixels - _BRIGHTNESS_MEAN) / _BRIGHTNESS_STD


def _shrink(planes: Float[Tensor, "n channels height width"]) -> Float[Tensor, "n channels side side"]:
    return functional.interpolate(planes, size=(CROP_PIXELS, CROP_PIXELS), mode="area")


def _position_planes(count: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    across = (torch.arange(width) * 2 + 1) / width - 1
    down = (torch.arange(height) * 2 + 1) / height - 1
    return across.expand(count, height, width), down[:, None].expand(count, height, width)


def coverage(tier: Tier) -> Float[Tensor, "tokens tiles"]:
    """For each image token of this tier, the share of its patch that lies on each tile."""
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
    # Patches need not align with tiles (3 patches, 4 tiles): upsample to a common multiple first.
    fine = functional.interpolate(planes, scale_factor=PATCHES_PER_SIDE, mode="nearest")
    return functional.adaptive_avg_pool2d(fine, PATCHES_PER_SIDE)[0].flatten(1).T
