"""Conditions from rows: {"prompt": "...", "video": "clip.gif", "camera": "path.npy"}; other columns go to the rewards.

`video` is a .npy file of bytes, a .gif, an image, or a folder of images in order of name. `camera` is a .npy or .json
file of [frames, 12] or [frames, 3, 4], or the numbers themselves, used as they are; or {"extrinsics": FILE,
"target": "cam02", "source": "cam01"} with a camera file of MultiCamVideo. Paths are relative to the dataset's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.data.rows import BadRow, Record, Records, RowFilter, format_counts, read_rows, require_columns
from groupwise.workloads.flow.multicam import METADATA, multicam_rows, target_poses
from groupwise.workloads.flow.task import Condition

_CONDITION_COLUMNS = ("prompt", "video", "camera")


@dataclass(frozen=True)
class ClipFormat:
    """What clips and camera paths are cut to."""

    size: tuple[int, int] | None = None
    """Height and width: clips are scaled to cover it, and the rest is cropped on both sides. None for as they are."""
    frames: int | None = None
    """Frames of a clip, of which camera files give the poses; None for all that they have."""


def read_conditions(dataset: str, row_filter: RowFilter, clips: ClipFormat = ClipFormat()) -> list[Condition]:  # noqa: B008
    """The conditions of a dataset: rows, or a folder of MultiCamVideo with its metadata.csv."""
    path = Path(dataset).expanduser()
    records = _multicam_records(path) if (path / METADATA).is_file() else read_rows(dataset, row_filter)
    folder = path if path.is_dir() else path.parent if path.exists() else Path()
    conditions = []
    for row, source, number in zip(records.rows, records.sources, records.numbers, strict=True):
        try:
            conditions.append(_condition(row, folder, f"{path.name}:{number}", clips))
        except BadRow as bad:
            row_filter.reject(source, bad)
    if not conditions:
        raise UserError(f"No row of {dataset} can be used: {format_counts(row_filter.skipped)}.")
    return conditions


def _multicam_records(folder: Path) -> Records:
    numbers, rows = zip(*multicam_rows(folder), strict=True)
    return Records(rows, [f"{folder / METADATA}, line {number}" for number in numbers], numbers)


def _condition(row: Record, folder: Path, name: str, clips: ClipFormat) -> Condition:
    require_columns(row, ["prompt"])
    if not isinstance(row["prompt"], str):
        raise BadRow("prompt of another type", f"its prompt is {type(row['prompt']).__name__}: it must be a text.")
    video, camera = row.get("video"), row.get("camera")
    if video is not None and not isinstance(video, str):
        raise BadRow("unreadable video", f"its video is {video!r}: it must be the path of a file or folder.")
    return Condition(
        prompt=row["prompt"],
        source_clip=read_clip(folder / video, size=clips.size) if video is not None else None,
        camera=_camera(camera, folder, clips.frames) if camera is not None else None,
        name=name,
        reward_columns={column: value for column, value in row.items() if column not in _CONDITION_COLUMNS},
    )


def _camera(camera: Any, folder: Path, frames: int | None) -> Float[Tensor, "frames 12"]:
    if isinstance(camera, Mapping):
        return _camera_of_file(camera, folder, frames)
    try:
        if isinstance(camera, str):
            path = folder / camera
            camera = np.load(path) if path.suffix == ".npy" else json.loads(path.read_text())
        poses = torch.tensor(np.asarray(camera, dtype=np.float32))
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise BadRow(
            "unreadable camera path",
            f"its camera path cannot be read ({error}): give [frames, 12] numbers, or a .npy or .json file.",
        ) from error
    if poses.ndim == 3 and poses.shape[1:] in ((3, 4), (4, 4)):
        poses = poses[:, :3].flatten(1)
    return poses


def _camera_of_file(camera: Mapping[str, Any], folder: Path, frames: int | None) -> Float[Tensor, "frames 12"]:
    given = {name: value for name, value in camera.items() if value is not None}
    required, known = {"extrinsics", "target"}, {"extrinsics", "target", "source"}
    if not required <= set(given) <= known or not all(isinstance(value, str) for value in given.values()):
        raise BadRow(
            "unreadable camera path",
            f'its camera is {dict(camera)}: it must be {{"extrinsics": FILE, "target": "cam02", "source": "cam01"}},'
            " where source may be left out.",
        )
    file = folder / given["extrinsics"]
    return target_poses(file, target=given["target"], source=given.get("source"), frames=frames)


def read_clip(path: Path, *, size: tuple[int, int] | None = None) -> Float[Tensor, "3 frames height width"]:
    """A clip in -1..1. Frames beside a video that cannot be read here (clip/ or clip.npy for clip.mp4) are taken."""
    beside = [path.with_suffix(""), path.with_suffix(".npy")] if path.suffix == ".mp4" else []
    path = next((other for other in beside if other.exists()), path)
    if not path.exists():
        raise BadRow("without a video", f"there is no video {path}.")
    frames = torch.from_numpy(_frames(path))
    if frames.ndim != 4 or frames.shape[-1] != 3 or not frames.numel():
        raise BadRow(
            "unreadable video",
            f"the video {path} has shape {list(frames.shape)}: it must be [frames, height, width, 3] bytes.",
        )
    clip = frames.permute(0, 3, 1, 2).float() / 127.5 - 1
    return (clip if size is None else _cover(clip, size)).transpose(0, 1).contiguous()


def _cover(clip: Float[Tensor, "frames 3 from_height from_width"], size: tuple[int, int]) -> Tensor:
    """Scaled until it covers the size, without distortion, and cropped to its center."""
    height, width = clip.shape[2:]
    scale = max(size[0] / height, size[1] / width)
    scaled = (round(height * scale), round(width * scale))
    if scaled != (height, width):
        clip = torch.nn.functional.interpolate(clip, size=scaled, mode="bilinear", antialias=True, align_corners=False)
    top, left = ((have - want) // 2 for have, want in zip(scaled, size, strict=True))
    return clip[:, :, top : top + size[0], left : left + size[1]]


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
    except (OSError, ValueError, EOFError) as error:
        raise BadRow(
            "unreadable video",
            f"the video {path} cannot be read ({error}): write it as a folder of images (ffmpeg -i clip.mp4"
            " clip/%05d.png), .gif or .npy.",
        ) from error
