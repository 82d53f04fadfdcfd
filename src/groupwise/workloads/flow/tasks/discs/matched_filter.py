"""Discs found by a matched filter: a painted disc of each color is slid over the pixels, and peaks are taken for discs.

At a place, the filter gives the cosine between the pixels around it and the painted disc, both without the background:
1 for a disc, less where it is too small or too large, oblong, torn, of another color, or joined to another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from groupwise.workloads.flow.tasks.discs.config import SIDE
from groupwise.workloads.flow.tasks.discs.scene import BACKGROUND, PALETTE, RADIUS, Images

_RADIUS = RADIUS * SIDE / 2
_REACH = round(1.7 * _RADIUS)
"""The filter sees this far around a disc: what is next to it must be empty."""
_MIN_COSINE, _GOOD_COSINE = 0.8, 0.95
"""Of what is taken for a disc, one of 0.8 or 1.25 times the radius has as much; and of one that is painted well."""
_FAINT = 0.5
"""Pixels with less than this share of a disc's brightness count as much as with it, so that nothing is not a disc."""


@dataclass(frozen=True)
class FoundDiscs:
    """By place of the filter, on a grid over the image."""

    is_disc: Bool[Tensor, "images side side"]
    color: Int64[Tensor, "images side side"]
    fit: Float[Tensor, " images"]
    """How well they are painted, from 0 for the smallest cosine to 1; mean over the discs, 0 without any."""
    explained: Float[Tensor, " images"]
    """Share of what is painted that is within the found discs."""


def find_discs(images: Images) -> FoundDiscs:
    pixels = images - BACKGROUND
    cosine, color = _cosines(pixels).max(1)
    is_disc = (cosine == _largest_near(cosine, round(_RADIUS))) & (cosine > _MIN_COSINE)
    fits = is_disc * ((cosine - _MIN_COSINE) / (_GOOD_COSINE - _MIN_COSINE)).clamp(0, 1)
    painted = pixels.square().sum(1)
    covered = painted * _largest_near(is_disc.float(), round(1.25 * _RADIUS))
    explained = covered.sum((1, 2)) / painted.sum((1, 2)).clamp(min=1e-3)
    fit = fits.sum((1, 2)) / is_disc.sum((1, 2)).clamp(min=1)
    return FoundDiscs(is_disc, color, fit, explained)


def _cosines(pixels: Float[Tensor, "images 3 side side"]) -> Float[Tensor, "images colors side side"]:
    axis = torch.arange(-_REACH, _REACH + 1).float()
    distance = (axis[:, None].square() + axis.square()).sqrt()
    disc, window = torch.sigmoid(2 * (_RADIUS - distance)), (distance < _REACH + 0.5).float()
    colors = PALETTE - BACKGROUND
    lengths = colors.norm(dim=1) * disc.norm()
    of_colors = torch.einsum("nkij,ck->ncij", pixels, colors)
    products = _slide(of_colors.flatten(0, 1), disc).view_as(of_colors) / lengths[:, None, None]
    energy = _slide(pixels.square().sum(1), window).clamp(min=0)
    return products / energy.sqrt().clamp(min=_FAINT * lengths.min().item())[:, None]


def _slide(pixels: Float[Tensor, "images side side"], kernel: Float[Tensor, "size size"]) -> Tensor:
    return functional.conv2d(pixels[:, None], kernel[None, None], padding=_REACH)[:, 0]


def _largest_near(values: Float[Tensor, "images side side"], reach: int) -> Float[Tensor, "images side side"]:
    return functional.max_pool2d(values[:, None], 2 * reach + 1, stride=1, padding=reach)[:, 0]
