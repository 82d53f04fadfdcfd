"""Conditions from disk: a JSONL file, a line each: {"prompt": "...", "video": "clip.gif", "camera": "path.npy"}.

`video` is a .npy file of bytes, a .gif, or a folder of pictures in order of name; `camera` is a .npy or .json file of
[frames, 12] or [frames, 3, 4], or the numbers themselves. Both are relative to the JSONL file.
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
from groupwise.workloads.flow.cameras import relative_to_first
from groupwise.workloads.flow.task import Condition

_KNOWN = ("prompt", "video", "camera")


def read_conditions(path: Path, *, size: tuple[int, int] | None = None) -> list[Condition]:
    """The conditions of a file; clips are resized to `size` (height, width). Other fields become columns."""
    if not path.is_file():
        raise UserError(f"There is no file {path} of conditions. Check the path, relative to {Path.cwd()}.")
    found = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            found.append(_condition(_fields(line, f"{path}:{number}"), path.parent, f"{path.name}:{number}", size))
    if not found:
        raise UserError(f'{path} holds no condition. Write a line of JSON for each: {{"prompt": "...", ...}}.')
    return found


def _fields(line: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}). Each line is one object.") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise UserError(f'{where} has no prompt: each line is an object with "prompt", a text (it may be empty).')
    return fields


def _condition(fields: dict[str, Any], folder: Path, where: str, size: tuple[int, int] | None) -> Condition:
    video, camera = fields.get("video"), fields.get("camera")
    return Condition(
        prompt=fields["prompt"],
        source_clip=read_clip(folder / video, size=size) if video is not None else None,
        camera=_camera(camera, folder, where) if camera is not None else None,
        name=where,
        reward_columns={name: value for name, value in fields.items() if name not in _KNOWN},
    )


def _camera(given: Any, folder: Path, where: str) -> Float[Tensor, "frames 12"]:
    try:
        if isinstance(given, str):
            path = folder / given
            given = np.load(path) if path.suffix == ".npy" else json.loads(path.read_text())
        poses = torch.tensor(np.asarray(given, dtype=np.float32))
    except (OSError, ValueError) as error:
        raise UserError(
            f"The camera path of {where} cannot be read ({error}). Give [frames, 12] numbers, or a .npy or .json file."
        ) from error
    if poses.ndim == 3 and poses.shape[1:] in ((3, 4), (4, 4)):
        poses = poses[:, :3].flatten(1)
    return relative_to_first(poses) if poses.ndim == 2 and poses.shape[1] == 12 and len(poses) else poses


def read_clip(path: Path, *, size: tuple[int, int] | None = None) -> Float[Tensor, "3 frames height width"]:
    """A clip in -1..1."""
    if not path.exists():
        raise UserError(f"There is no video {path}. Complete the dataset, or leave this condition out.")
    frames = torch.from_numpy(_frames(path))
    if frames.ndim != 4 or frames.shape[-1] != 3:
        raise UserError(
            f"The video {path} has shape {list(frames.shape)}: it must be [frames, height, width, 3] bytes."
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
            pictures: list[Image.Image] = [Image.open(each) for each in sorted(path.iterdir())]
        elif path.suffix == ".npy":
            found: np.ndarray[Any, Any] = np.load(path)
            if found.dtype != np.uint8:
                raise ValueError(f"its numbers are {found.dtype}, not bytes from 0 to 255")
            return found
        else:
            pictures = ImageSequence.all_frames(Image.open(path))
        return np.stack([np.asarray(picture.convert("RGB")) for picture in pictures])
    except (OSError, ValueError) as error:
        raise UserError(
            f"The video {path} cannot be read ({error}). Write it as a folder of pictures (ffmpeg -i clip.mp4"
            " clip/%05d.png), .gif or .npy."
        ) from error
