"""MultiCamVideo, the dataset of ReCamMaster (Bai et al., arXiv 2503.11647): its folders and its camera files.

A scene has `videos/cam01.mp4` to `cam10.mp4` and `cameras/camera_extrinsics.json`; `metadata.csv` (file_name, text) at
the top names the clips below `train/`. In the camera file `frameN` -> `camNN` is a text of four rows "[a b c 0] ...
[x y z 1]": Unreal's forward, right and up axis and the position in centimeters, as row vectors.
"""

from __future__ import annotations

import csv
import io
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.io.files import parse_json, read_bytes
from groupwise.data.rows import BadRow, Record, Records

METADATA = "metadata.csv"
_BEYOND = "beyond the header"
"""Values of a row for which there are no columns."""
FRAMES_PER_LATENT = 4
"""The VAE joins four video frames; a latent frame has the pose of the last of them (of the first frame: its own)."""
Poses = NDArray[np.float64]
"""[frames, 4, 4], camera to world: OpenCV's camera axes (right, down, forward) in a left-handed world, meters."""


def target_poses(
    file: Path, *, target: str, source: str | None = None, frames: int | None = None
) -> Float[Tensor, "latent_frames 12"]:
    """The poses of the latent frames of a clip of `frames` frames, along the path of the camera `target`.

    They are relative to the first pose of the camera that filmed the source clip, as ReCamMaster is trained; without
    `source` to the path's own first pose, as it is run on clips whose cameras are not known.
    """
    cameras = _read(file)
    poses = camera_poses(cameras, target, file)
    reference = poses[0] if source is None else camera_poses(cameras, source, file)[0]
    if frames is not None and len(poses) < frames:
        raise BadRow(
            "camera path too short",
            f"{file} has {len(poses)} frames of {target}, and the clips have {frames}. Lower --workload.frames.",
        )
    return relative_poses(poses[:frames:FRAMES_PER_LATENT], reference)


def relative_poses(poses: Poses, reference: NDArray[np.float64]) -> Float[Tensor, "frames 12"]:
    """inverse(reference) x pose, in float64; the upper three rows of each, row by row, in float32."""
    relative = np.linalg.inv(reference) @ poses
    return torch.from_numpy(relative[:, :3].reshape(-1, 12)).float()


def camera_poses(cameras: Mapping[str, Any], name: str, file: Path) -> Poses:
    """The path of one camera of a camera file."""
    if not cameras or not all(f"frame{index}" in cameras for index in range(len(cameras))):
        raise BadRow(*_unreadable(file, f"its keys must be frame0 to frame{max(0, len(cameras) - 1)}"))
    texts = [cameras[f"frame{index}"] for index in range(len(cameras))]
    if not all(isinstance(text, Mapping) and name in text for text in texts):
        known = ", ".join(sorted(texts[0])) if isinstance(texts[0], Mapping) else "no camera"
        raise BadRow("unknown camera", f"{file} has no camera '{name}' in each frame: its first frame has {known}.")
    matrices = np.stack([_parse(text[name], file) for text in texts])
    _check_rotations(matrices[:, :3, :3], name, file)
    poses = matrices.transpose(0, 2, 1)[:, :, [1, 2, 0, 3]]  # columns: right, up, forward, position
    poses[:, :3, 1] *= -1  # up -> down
    poses[:, :3, 3] /= 100  # centimeters -> meters
    return poses


def read_metadata(folder: Path) -> Records:
    """The rows of metadata.csv as they are: see `multicam_row`."""
    path = folder / METADATA
    try:
        text = read_bytes(path, follow_links=True).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} holds the byte 0x{error.object[error.start]:02x} where UTF-8 has none: it must be UTF-8. Save it"
            " again in that encoding."
        ) from error
    reader = csv.DictReader(io.StringIO(text, newline=""), restkey=_BEYOND, strict=True)
    try:
        header = list(reader.fieldnames or ())
        lines = [(row, reader.line_num) for row in reader]
    except csv.Error as error:
        raise UserError(
            f"{path}, line {reader.reader.line_num} is not CSV ({error}): a text in double quotes must end with one,"
            " and a quote in it is written twice. Fix it."
        ) from error
    if not {"file_name", "text"} <= set(header):
        raise UserError(
            f"{path} has the columns {', '.join(map(repr, header)) or 'none'}: it needs file_name and text. Name them"
            " in its first line."
        )
    if not lines:
        raise UserError(f"{path} holds a header alone: it must name the clips, one a line. Add at least one.")
    rows, numbers = zip(*lines, strict=True)
    return Records(rows, [f"{path}, line {number}" for number in numbers], numbers)


def multicam_row(folder: Path, row: Record) -> Record:
    """A condition of a row of metadata.csv: its clip's path, and another clip of its scene as the source.

    The source is drawn from the other cameras of the scene by the clip's name: always the same. A column `source`
    (such as cam03) names it instead.
    """
    _check(row)
    columns = {name: value for name, value in row.items() if name not in ("file_name", "text", "source")}
    clip = Path("train") / row["file_name"]
    scene = clip.parent.parent
    camera = {"extrinsics": str(scene / "cameras" / "camera_extrinsics.json"), "target": clip.stem}
    source = row.get("source") or _draw_source(folder / clip.parent, clip)
    return {
        **columns,
        "prompt": row["text"],
        "video": str(clip.parent / f"{source}{clip.suffix}"),
        "camera": {**camera, "source": source},
    }


def _check(row: Record) -> None:
    header = [name for name in row if name != _BEYOND]
    values = len(header) + len(row.get(_BEYOND, ())) - sum(row[name] is None for name in header)
    if values != len(header):
        raise BadRow(
            "row of another length",
            f"it has {values} values for the {len(header)} columns {', '.join(header)}: a text with commas must be in"
            " double quotes.",
        )
    if not row["file_name"]:
        raise BadRow("without a clip", "its file_name is empty: it must be the path of a clip below train/.")
    source = row.get("source")
    if source and Path(source).name != source:
        raise BadRow("unknown source", f"its source is '{source}': it must be the name of a camera, such as cam03.")


def _draw_source(videos: Path, clip: Path) -> str:
    others = sorted({file.stem for file in videos.glob("cam*")} - {clip.stem})
    return random.Random(str(clip)).choice(others) if others else clip.stem


def _read(file: Path) -> Mapping[str, Any]:
    try:
        cameras = parse_json(read_bytes(file, follow_links=True))
    except (OSError, ValueError) as error:
        raise BadRow(*_unreadable(file, str(error))) from error
    if not isinstance(cameras, Mapping):
        raise BadRow(*_unreadable(file, f"it holds {type(cameras).__name__}, not frames by name"))
    return cameras


def _parse(text: Any, file: Path) -> NDArray[np.float64]:
    rows = re.findall(r"\[([^\[\]]*)\]", text) if isinstance(text, str) else []
    try:
        matrix = np.array([[float(number) for number in row.split()] for row in rows]).reshape(4, 4)
        if not np.isfinite(matrix).all() or matrix[:, 3].tolist() != [0, 0, 0, 1]:
            raise ValueError("no pose")
        return matrix
    except ValueError as error:
        why = f"'{str(text)[:40]}' is not three axes [a b c 0] and a position [x y z 1]"
        raise BadRow(*_unreadable(file, why)) from error


def _check_rotations(axes: NDArray[np.float64], name: str, file: Path) -> None:
    """Forward, right and up must be orthogonal, of length 1, and not mirrored."""
    deviation = np.abs(axes @ axes.transpose(0, 2, 1) - np.eye(3)).max((1, 2))
    wrong = ~(deviation < 1e-2) | (np.linalg.det(axes) < 0)
    if wrong.any():
        frame = int(wrong.argmax())
        how = "mirrored" if deviation[frame] < 1e-2 else f"no rotation (R R^T differs from 1 by {deviation[frame]:.2g})"
        raise BadRow("camera without rotation", f"{name} of {file} is {how} in frame {frame}.")


def _unreadable(file: Path, why: str) -> tuple[str, str]:
    return "unreadable camera path", f"the camera file {file} cannot be read ({why})."
