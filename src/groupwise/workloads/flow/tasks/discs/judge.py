"""An independent judge of the embedded images: it counts connected areas, and takes only round ones for discs.

It is not trained on: where the reward rises and the judge's verdict does not, the policy has learned to please the
reward. With the rewards of kind `areas` it shares how much of a color a pixel has (`color_shares`); with `discs` no
measurement, only what the scene defines: the palette, a disc's radius and the halves of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from groupwise.workloads.flow.tasks.discs.scene import COLORS, RADIUS, Images, Meanings, color_shares, parse_prompts

_MIN_SHARE = 0.5
_SPECK = 4
"""Pixels; smaller areas are not looked at."""
_RADIUS_RANGE = (0.75, 1.3)
_MIN_ROUNDNESS = 0.7


def judge_obeyed(prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
    """1 where the image shows exactly the discs asked for, and nothing else."""
    return obeys(torch.stack(list(completions)), parse_prompts(prompts)).float().tolist()


def judge_discs(prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
    """The share of an image's colored areas that are discs, whatever was asked for; 0 without any."""
    areas = colored_areas(torch.stack(list(completions)))
    image = torch.tensor([index for index, each in enumerate(areas) for _ in each.is_disc])
    is_disc = torch.cat([each.is_disc for each in areas]).float()
    counts = torch.zeros(2, len(areas)).index_add_(1, image.long(), torch.stack([is_disc, torch.ones_like(is_disc)]))
    return (counts[0] / counts[1].clamp(min=1)).tolist()


@dataclass(frozen=True)
class ColoredAreas:
    """The connected areas of an image, of all colors."""

    color: Int64[Tensor, " areas"]
    center: Float[Tensor, "areas 2"]
    """x and y, from -1 to 1."""
    is_disc: Bool[Tensor, " areas"]


def obeys(images: Images, meanings: Meanings) -> Bool[Tensor, " images"]:
    return torch.tensor(
        [
            len(areas.color) == count + 1
            and bool(areas.is_disc.all() and (areas.color == color).all() and _is_at(areas.center, place).all())
            for areas, (count, color, place) in zip(colored_areas(images), meanings.tolist(), strict=True)
        ]
    )


def _is_at(center: Float[Tensor, "areas 2"], place: int) -> Bool[Tensor, " areas"]:
    along = center[:, place // 2]
    return along < 0 if place % 2 == 0 else along > 0


def colored_areas(images: Images) -> list[ColoredAreas]:
    masks = color_shares(images) > _MIN_SHARE
    labels = connected_labels(masks.flatten(0, 1)).view(masks.shape)
    return [_areas_of(image) for image in labels]


def connected_labels(masks: Bool[Tensor, "masks side side"]) -> Int64[Tensor, "masks side side"]:
    """A number above 0 for each connected area of a mask, diagonals included: its largest pixel's. 0 outside."""
    side = masks.shape[-1]
    inside = masks.float()
    labels = inside * (1 + torch.arange(side * side, dtype=torch.float32)).view(side, side)
    while True:
        spread = functional.max_pool2d(labels[:, None], 3, stride=1, padding=1)[:, 0] * inside
        if torch.equal(spread, labels):
            return labels.long()
        labels = spread


def _areas_of(labels: Int64[Tensor, "3 side side"]) -> ColoredAreas:
    side = labels.shape[-1]
    parts: list[tuple[int, Tensor, bool]] = []
    for color in range(len(COLORS)):
        for label in labels[color].unique().tolist():
            pixels = (labels[color] == label).nonzero().float()
            if label and len(pixels) >= _SPECK:
                middle = pixels.mean(0)
                parts.append((color, ((middle + 0.5) * 2 / side - 1).flip(0), _is_disc(pixels - middle, side)))
    return ColoredAreas(
        torch.tensor([color for color, _, _ in parts], dtype=torch.int64),
        torch.stack([center for _, center, _ in parts]) if parts else torch.zeros(0, 2),
        torch.tensor([is_disc for _, _, is_disc in parts], dtype=torch.bool),
    )


def _is_disc(offsets: Float[Tensor, "pixels 2"], side: int) -> bool:
    """By the radius that its area gives, and by how far its pixels reach: a disc of radius r has none beyond it."""
    radius = (len(offsets) / torch.pi) ** 0.5
    reach = float(offsets.norm(dim=1).max()) + 0.5
    low, high = (factor * RADIUS * side / 2 for factor in _RADIUS_RANGE)
    return low <= radius <= high and (radius / reach) ** 2 >= _MIN_ROUNDNESS
