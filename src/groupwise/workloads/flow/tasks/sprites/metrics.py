"""Metrics of the embedded task that no reward looks at: the floor's pattern, and the distance to the true clip.

    floor     correlation of the brightness with the true clip's where neither has a sprite, mean over frames
    psnr      -10 log10 of the mean squared error of all pixels, in dB

A policy that only pleases the rewards, by moving the sprites over a floor that stays, does not improve them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.workloads.flow.tasks.sprites.latents import Clips, true_clips
from groupwise.workloads.flow.tasks.sprites.pixels import SmallClips, halve, sprite_shares
from groupwise.workloads.flow.tasks.sprites.scene import light_levels

_NO_SPRITE = 0.05
_MIN_SQUARED_ERROR = 1e-6
_CLIPS_AT_ONCE = 16

Metric = Callable[[Clips, Clips, Float[Tensor, " clips"]], Float[Tensor, " clips"]]


def against_truth(metric: Metric) -> Callable[..., list[float]]:
    """A metric of (clips, true clips, light) as a function of TRL's signature."""

    def measure(prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
        values: list[float] = []
        for start in range(0, len(completions), _CLIPS_AT_ONCE):
            rows = slice(start, start + _CLIPS_AT_ONCE)
            light = light_levels(prompts[rows])
            truth = true_clips(torch.stack(columns["scene"][rows]), torch.stack(columns["cameras"][rows]), light)
            values += metric(torch.stack(list(completions[rows])), truth, light).tolist()
        return values

    return measure


def floor_correlation(clips: Clips, truth: Clips, light: Float[Tensor, " clips"]) -> Float[Tensor, " clips"]:
    small, small_truth = halve(clips), halve(truth)
    free = (_without_sprites(small, light) & _without_sprites(small_truth, light)).float()
    generated, wanted = (_centered(clip.mean(1), free) for clip in (small, small_truth))
    product, squares = (
        (generated * wanted).sum((-1, -2)),
        generated.square().sum((-1, -2)) * wanted.square().sum((-1, -2)),
    )
    return (product / squares.sqrt().clamp(min=1e-6)).mean(1)


def psnr(clips: Clips, truth: Clips, light: Float[Tensor, " clips"]) -> Float[Tensor, " clips"]:
    squared_error = ((clips - truth) / 2).square().flatten(1).mean(1)
    return -10 * squared_error.clamp(min=_MIN_SQUARED_ERROR).log10()


def _without_sprites(clips: SmallClips, light: Float[Tensor, " clips"]) -> Tensor:
    return sprite_shares(clips, light).amax(1) < _NO_SPRITE


def _centered(brightness: Tensor, free: Tensor) -> Tensor:
    """Minus its mean over the free pixels of each frame; 0 elsewhere."""
    mean = (brightness * free).sum((-1, -2), keepdim=True) / free.sum((-1, -2), keepdim=True).clamp(min=1)
    return (brightness - mean) * free
