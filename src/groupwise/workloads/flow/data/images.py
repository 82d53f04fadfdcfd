"""Images of generated clips for models from pipelines: a sheet of frames, and an animation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.workloads.flow.task import Condition

_FRAMES, _MAX_HEIGHT = 5, 240
Pixels = np.ndarray[Any, Any]
"""[frames, height, width, 3] bytes."""


def draw_sheet(conditions: Sequence[Condition], clips: Float[Tensor, "rows ..."]) -> Callable[[Path], None]:
    """One row per condition: some frames of the source clip, where it has one, above those that were generated."""

    def draw(path: Path) -> None:
        from PIL import Image

        rows = [_frames(_pixels(clip)) for pair in _with_sources(conditions, clips) for clip in pair]
        width = max(row.shape[1] for row in rows)
        padded = [np.pad(row, ((0, 0), (0, width - row.shape[1]), (0, 0))) for row in rows]
        Image.fromarray(np.concatenate(padded)).save(path)

    return draw


def draw_movie(conditions: Sequence[Condition], clips: Float[Tensor, "rows ..."]) -> Callable[[Path], None]:
    """Clips one below the other, each beside its source where it has one, as an animation."""

    def draw(path: Path) -> None:
        from PIL import Image

        rows = [np.concatenate([_pixels(clip) for clip in pair], axis=2) for pair in _with_sources(conditions, clips)]
        frames = [Image.fromarray(frame) for frame in np.concatenate(rows, axis=1)]
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=67, loop=0)

    return draw


def _with_sources(conditions: Sequence[Condition], clips: Tensor) -> list[list[Tensor]]:
    """Each clip, after a source clip of the same frames and size."""
    return [
        [*([] if source is None else [source]), clip]
        for clip, source in (
            (clip, _source(condition, clip)) for clip, condition in zip(clips, conditions, strict=True)
        )
    ]


def _source(condition: Condition, clip: Tensor) -> Tensor | None:
    shape = condition.source_shape
    if shape is None or clip.ndim != 4 or shape[1] < clip.shape[1]:
        return None
    return condition.read_source(clip.shape[1])


def _frames(pixels: Pixels) -> Pixels:
    """Some frames side by side."""
    chosen = np.linspace(0, len(pixels) - 1, min(_FRAMES, len(pixels))).round().astype(int)
    return np.concatenate(list(pixels[chosen]), axis=1)


def _pixels(clip: Tensor) -> Pixels:
    """Of a clip, or of an image as a clip of one frame; large ones are made smaller."""
    frames = clip[:, None] if clip.ndim == 3 else clip
    height, width = frames.shape[2:]
    if height > _MAX_HEIGHT:
        size = (_MAX_HEIGHT, round(width * _MAX_HEIGHT / height))
        resized = torch.nn.functional.interpolate(frames.transpose(0, 1), size=size, mode="bilinear", antialias=True)
        frames = resized.transpose(0, 1)
    pixels: Pixels = ((frames.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()
    return pixels
