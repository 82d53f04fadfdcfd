"""Conditions from rows: {"prompt": "...", "video": "clip.gif", "camera": "path.npy"}; other columns go to the rewards.

`video` is a .npy file of bytes, a .gif, or a folder of images in order of name; `camera` is a .npy or .json file of
[frames, 12] or [frames, 3, 4], or the numbers themselves. Paths are relative to the dataset's folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.data.rows import BadRow, Record, RowFilter, format_counts, read_rows, require_columns
from groupwise.workloads.flow.cameras import relative_to_first
from groupwise.workloads.flow.task import Condition

_CONDITION_COLUMNS = ("prompt", "video", "camera")


def read_conditions(dataset: str, row_filter: RowFilter, *, size: tuple[int, int] | None = None) -> list[Condition]:
    """The conditions of a dataset; clips are resized to `size` (height, width)."""
    records, path = read_rows(dataset, row_filter), Path(dataset).expanduser()
    folder = path.parent if path.exists() else Path()
    conditions = []
    for row, source, number in zip(records.rows, records.sources, records.numbers, strict=True):
        try:
            conditions.append(_condition(row, folder, f"{path.name}:{number}", size))
        except BadRow as bad:
            row_filter.reject(source, bad)
    if not conditions:
        raise UserError(f"No row of {dataset} can be used: {format_counts(row_filter.skipped)}.")
    return conditions


def _condition(row: Record, folder: Path, name: str, size: tuple[int, int] | None) -> Condition:
    require_columns(row, ["prompt"])
    if not isinstance(row["prompt"], str):
        raise BadRow("prompt of another type", f"its prompt is {type(row['prompt']).__name__}: it must be a text.")
    video, camera = row.get("video"), row.get("camera")
    return Condition(
        prompt=row["prompt"],
        source=read_clip(folder / video, size=size) if video is not None else None,
        camera=_camera(camera, folder) if camera is not None else None,
        name=name,
        columns={column: value for column, value in row.items() if column not in _CONDITION_COLUMNS},
    )


def _camera(camera: Any, folder: Path) -> Float[Tensor, "frames 12"]:
    try:
        if isinstance(camera, str):
            path = folder / camera
            camera = np.load(path) if path.suffix == ".npy" else json.loads(path.read_text())
        poses = torch.tensor(np.asarray(camera, dtype=np.float32))
    except (OSError, ValueError, TypeError) as error:
        raise BadRow(
            "unreadable camera path",
            f"its camera path cannot be read ({error}): give [frames, 12] numbers, or a .npy or .json file.",
        ) from error
    if poses.ndim == 3 and poses.shape[1:] in ((3, 4), (4, 4)):
        poses = poses[:, :3].flatten(1)
    return relative_to_first(poses) if poses.ndim == 2 and poses.shape[1] == 12 and len(poses) else poses


def read_clip(path: Path, *, size: tuple[int, int] | None = None) -> Float[Tensor, "3 frames height width"]:
    """A clip in -1..1."""
    if not path.exists():
        raise BadRow("without a video", f"there is no video {path}.")
    frames = torch.from_numpy(_frames(path))
    if frames.ndim != 4 or frames.shape[-1] != 3:
        raise BadRow(
            "unreadable video",
            f"the video {path} has shape {list(frames.shape)}: it must be [frames, height, width, 3] bytes.",
        )
    clip = frames.permute(0, 3, 1, 2).float() / 127.5 - 1
    if size is not None and tuple(clip.shape[2:]) != size:
        clip = torch.nn.functional.interpolate(clip, size=size, mode="bilinear", antialias=True, align_corners=False)
    return clip.transpose(0, 1).contiguous()


def _frames(path: Path) -> np.ndarray[Any, Any]:
    """[frames, height, width, 3] bytes."""
    from PIL import Image, ImageSequence

    try:
        if path.is_dir():
            images: list[Image.Image] = [Image.open(file) for file in sorted(path.iterdir())]
        elif path.suffix == ".npy":
            frames: np.ndarray[Any, Any] = np.load(path)
            if frames.dtype != np.uint8:
                raise ValueError(f"its numbers are {frames.dtype}, not bytes from 0 to 255")
            return frames
        else:
            images = ImageSequence.all_frames(Image.open(path))
        return np.stack([np.asarray(image.convert("RGB")) for image in images])
    except (OSError, ValueError) as error:
        raise BadRow(
            "unreadable video",
            f"the video {path} cannot be read ({error}): write it as a folder of images (ffmpeg -i clip.mp4"
            " clip/%05d.png), .gif or .npy.",
        ) from error
