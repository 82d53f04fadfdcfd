"""A sheet of generated images under their prompts, with the judge's verdict as a border."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from groupwise.workloads.flow.task import Condition
from groupwise.workloads.flow.tasks.discs.config import SIDE
from groupwise.workloads.flow.tasks.discs.judge import obeys
from groupwise.workloads.flow.tasks.discs.scene import parse_prompts

_ZOOM, _COLUMNS, _TITLE, _BORDER, _GAP = 3, 6, 14, 3, 8
_WIDTH, _HEIGHT = _ZOOM * SIDE + 2 * _BORDER + _GAP, _ZOOM * SIDE + 2 * _BORDER + _GAP + _TITLE
_GREEN, _RED = "#228833", "#cc3311"


def draw_images_sheet(conditions: Sequence[Condition], images: Tensor) -> Callable[[Path], None]:
    """Green borders where the judge says that the prompt was obeyed, red ones where not."""
    return lambda path: _draw(conditions, images, path)


def _draw(conditions: Sequence[Condition], images: Tensor, path: Path) -> None:
    prompts = [condition.prompt for condition in conditions]
    obeyed = obeys(images, parse_prompts(prompts)).tolist()
    rows = -(-len(prompts) // _COLUMNS)
    sheet = Image.new("RGB", (_COLUMNS * _WIDTH, rows * _HEIGHT), "white")
    drawing = ImageDraw.Draw(sheet)
    for index, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
        left, top = index % _COLUMNS * _WIDTH, index // _COLUMNS * _HEIGHT
        drawing.text((left + _BORDER, top), prompt, fill="black")
        frame = (left, top + _TITLE, left + _WIDTH - _GAP - 1, top + _HEIGHT - _GAP - 1)
        drawing.rectangle(frame, fill=_GREEN if obeyed[index] else _RED)
        sheet.paste(_picture(image), (left + _BORDER, top + _TITLE + _BORDER))
    sheet.save(path)


def _picture(image: Tensor) -> Image.Image:
    """An image [3, side, side] in -1..1, enlarged."""
    pixels = ((image.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return Image.fromarray(pixels).resize((_ZOOM * SIDE, _ZOOM * SIDE), Image.Resampling.BICUBIC)
