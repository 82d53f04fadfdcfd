"""Conditions from rows: {"prompt": "...", "video": "clip.gif", "camera": "path.npy"}; other columns go to the rewards.

`video` is a clip (clips.py), of which only the header is read here. `camera` is a .npy or .json file of [frames, 12] or
[frames, 3, 4], or the numbers themselves, used as they are; or {"extrinsics": FILE, "target": "cam02", "source":
"cam01"} with a camera file of MultiCamVideo. Paths are relative to the dataset's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.io.files import open_regular, parse_json, read_bytes, user_path
from groupwise.data.rows import BadRow, Record, RowFilter, format_counts, read_rows, require_columns
from groupwise.workloads.flow.data.clips import ClipFormat, open_clip
from groupwise.workloads.flow.data.multicam import METADATA, multicam_row, read_metadata, target_poses
from groupwise.workloads.flow.task import Condition

_CONDITION_COLUMNS = ("prompt", "video", "camera")
_MAX_POSES = 100_000
"""Of a camera path; longer ones are refused before they are read."""


def read_conditions(dataset: str, row_filter: RowFilter, clips: ClipFormat = ClipFormat()) -> list[Condition]:  # noqa: B008
    """The conditions of a dataset: rows, or a folder of MultiCamVideo with its metadata.csv."""
    path = user_path(dataset)
    is_multicam = (path / METADATA).is_file()
    records = read_metadata(path) if is_multicam else read_rows(dataset, row_filter)
    folder = path if path.is_dir() else path.parent if path.exists() else Path()
    conditions = []
    for row, source, number in zip(records.rows, records.sources, records.numbers, strict=True):
        try:
            record = multicam_row(folder, row) if is_multicam else row
            conditions.append(_condition(record, folder, f"{path.name}:{number}", clips))
        except BadRow as bad:
            row_filter.reject(source, bad)
    if not conditions:
        counts = format_counts(row_filter.skipped) or "it has none"
        raise UserError(f"No row of {dataset} can be used: {counts}.")
    return conditions


def _condition(row: Record, folder: Path, name: str, clips: ClipFormat) -> Condition:
    require_columns(row, ["prompt"])
    if not isinstance(row["prompt"], str):
        raise BadRow("prompt of another type", f"its prompt is {type(row['prompt']).__name__}: it must be a text.")
    video, camera = row.get("video"), row.get("camera")
    if video is not None and not isinstance(video, str):
        raise BadRow("unreadable video", f"its video is {video!r}: it must be the path of a file or folder.")
    return Condition(
        prompt=row["prompt"],
        source_file=open_clip(folder / video, video, clips) if video is not None else None,
        camera=_camera(camera, folder, clips.frames) if camera is not None else None,
        name=name,
        reward_columns={column: value for column, value in row.items() if column not in _CONDITION_COLUMNS},
    )


def _camera(camera: Any, folder: Path, frames: int | None) -> Float[Tensor, "frames 12"]:
    if isinstance(camera, Mapping):
        return _camera_of_file(camera, folder, frames)
    try:
        if isinstance(camera, str):
            camera = _read_numbers(folder / camera)
        poses = torch.tensor(np.asarray(camera, dtype=np.float32))
    except (OSError, ValueError, TypeError, AttributeError, EOFError, OverflowError, TokenError) as error:
        raise BadRow(
            "unreadable camera path",
            f"its camera path cannot be read ({error}): give [frames, 12] numbers, or a .npy or .json file.",
        ) from error
    if poses.ndim == 3 and poses.shape[1:] in ((3, 4), (4, 4)):
        poses = poses[:, :3].flatten(1)
    return poses


def _read_numbers(path: Path) -> Any:
    """What a .npy or .json file holds; its size is checked first."""
    if path.suffix == ".npy":
        open_regular(path, follow_links=True).close()
        numbers = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped: no more than the file has
        if numbers.size > 16 * _MAX_POSES:
            raise ValueError(f"it has shape {list(numbers.shape)}, and a path has at most {_MAX_POSES:,} poses")
        return numbers
    return parse_json(read_bytes(path, follow_links=True))


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
