"""Pictures of clips: what was asked for above what models generated. White rings mark where sprites should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from groupwise.workloads.flow.task import Condition
from groupwise.workloads.flow.tasks.sprites.config import FRAMES, SIDE
from groupwise.workloads.flow.tasks.sprites.latents import true_clips
from groupwise.workloads.flow.tasks.sprites.scene import light_levels

_ZOOM, _GAP, _LABEL_WIDTH = 2, 2, 84
_CELL = _ZOOM * SIDE + _GAP
_RING = 5
_FRAME_MS, _LAST_FRAME_MS = 140, 900


def draw_clips_sheet(conditions: Sequence[Condition], clips: Tensor) -> Callable[[Path], None]:
    """All frames of the requested and the generated clips."""
    return lambda path: draw_sheet(conditions, {"generated": clips}, path)


def draw_clips_gif(conditions: Sequence[Condition], clips: Tensor) -> Callable[[Path], None]:
    """The requested clips above the generated ones, as an animation."""
    return lambda path: draw_gif(conditions, {"generated": clips}, path)


def requested_clips(conditions: Sequence[Condition]) -> Tensor:
    """What a camera on the requested path would show."""
    cameras = torch.stack([condition.camera for condition in conditions if condition.camera is not None])
    scenes = torch.stack([condition.reward_columns["scene"] for condition in conditions])
    return true_clips(scenes, cameras, light_levels([condition.prompt for condition in conditions]))


def draw_sheet(conditions: Sequence[Condition], generated: Mapping[str, Tensor], path: Path) -> None:
    """A block per condition: its source picture, then a row of frames for the requested clip and for each model's."""
    rows = {"asked": requested_clips(conditions), **generated}
    block = len(rows) * _CELL + 3 * _GAP
    sheet = Image.new("RGB", (_LABEL_WIDTH + (1 + FRAMES) * _CELL, len(conditions) * block), "white")
    for index, condition in enumerate(conditions):
        assert condition.source_clip is not None
        sheet.paste(_picture(condition.source_clip[:, 0]), (_LABEL_WIDTH, index * block))
        for row, (label, clips) in enumerate(rows.items()):
            top = index * block + row * _CELL
            ImageDraw.Draw(sheet).text((4, top + _CELL // 2 - 6), label, fill="black")
            for frame in range(FRAMES):
                picture = _with_rings(_picture(clips[index][:, frame]), condition, frame)
                sheet.paste(picture, (_LABEL_WIDTH + (1 + frame) * _CELL, top))
    sheet.save(path)


def draw_gif(conditions: Sequence[Condition], generated: Mapping[str, Tensor], path: Path) -> None:
    """A column per condition, a row for the requested clips and for each model's; the last frame stays longer."""
    rows = {"asked": requested_clips(conditions), **generated}
    size = (_LABEL_WIDTH + len(conditions) * _CELL, len(rows) * _CELL)
    pictures = []
    for frame in range(FRAMES):
        picture = Image.new("RGB", size, "white")
        for row, (label, clips) in enumerate(rows.items()):
            ImageDraw.Draw(picture).text((4, row * _CELL + _CELL // 2 - 6), label, fill="black")
            for column, condition in enumerate(conditions):
                cell = _with_rings(_picture(clips[column][:, frame]), condition, frame)
                picture.paste(cell, (_LABEL_WIDTH + column * _CELL, row * _CELL))
        pictures.append(picture)
    durations = [_FRAME_MS] * (FRAMES - 1) + [_LAST_FRAME_MS]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=durations, loop=0)


def _picture(frame: Tensor) -> Image.Image:
    """A frame [3, side, side] in -1..1, enlarged."""
    pixels = ((frame.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(pixels).resize((_ZOOM * SIDE, _ZOOM * SIDE), Image.Resampling.BICUBIC)


def _with_rings(picture: Image.Image, condition: Condition, frame: int) -> Image.Image:
    for across, down in condition.reward_columns["centroid"][:, frame].tolist():
        x, y = ((1 + place) / 2 * _ZOOM * SIDE for place in (across, down))
        ImageDraw.Draw(picture).ellipse((x - _RING, y - _RING, x + _RING, y + _RING), outline="white")
    return picture
