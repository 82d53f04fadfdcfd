"""Clips in files: their size from the header alone, their frames as bytes when they are needed.

A clip is a video (.mp4, .mov, .webm, .mkv, .avi), a .npy file of bytes, a .gif, an image, or a folder of images in
order of name. Files may come from strangers: sizes are checked before anything is allocated, nothing is unpickled, and
a video cannot name other files or addresses.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.groups import content_hash
from groupwise.core.io.files import open_regular
from groupwise.core.units import format_bytes
from groupwise.data.file_hash import file_hash
from groupwise.data.rows import BadRow

MAX_FRAME_PIXELS = 1 << 26
"""Pixels of a frame, such as 8192 x 8192."""
MAX_CLIP_BYTES = 4 << 30
"""Of all frames that are read of a clip, at three bytes a pixel; larger ones need fewer frames or a smaller size."""
_CONTAINERS = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".webm": "matroska", ".mkv": "matroska", ".avi": "avi"}
"""The format that a video is read in: never one that refers to other files, such as a playlist."""
_IMAGE_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
_BROKEN = (
    *(OSError, ValueError, SyntaxError, EOFError, TypeError, OverflowError, IndexError, KeyError),
    *(struct.error, TokenError),
)
"""What readers raise for a damaged file."""
Frame = np.ndarray[Any, Any]
"""[height, width, 3] bytes."""


@dataclass(frozen=True)
class ClipFormat:
    """What clips and camera paths are cut to."""

    size: tuple[int, int] | None = None
    """Height and width: clips are scaled to cover it, and the rest is cropped on both sides. None for as they are."""
    frames: int | None = None
    """Frames of a clip, of which camera files give the poses; None for all that they have."""


@dataclass(frozen=True)
class ClipFile:
    """A clip on the disk, of which only the header was read."""

    path: Path
    name: str
    """As the dataset has it: the same on all machines."""
    shape: tuple[int, int, int]
    """Frames, height and width of what is read."""
    file_bytes: int
    """Of a folder, all of its files."""

    def read(self, frames: int | None = None) -> UInt8[Tensor, "3 frames height width"]:
        """The first `frames` frames, or all, scaled and cropped to the shape. Each is decoded and scaled on its own."""
        count, height, width = self.shape
        count = count if frames is None else min(count, frames)
        clip = torch.empty((3, count, height, width), dtype=torch.uint8)
        done = 0
        try:
            for frame in islice(_decode(self.path), count):
                clip[:, done] = _cover(torch.from_numpy(np.array(frame)).permute(2, 0, 1), (height, width))
                done += 1
        except BadRow as bad:
            raise UserError(f"After {done} of {count} frames: {bad.message} Fix the file, or remove its row.") from bad
        if done < count:
            raise UserError(
                f"The video {self.path} ends after {done} of the {count} frames that its header promises. Write it"
                " again, or remove its row."
            )
        return clip

    def content_key(self) -> str:
        """A hash of the files' bytes and of the shape that they are read in; nothing is decoded."""
        if not self.path.is_dir():
            return content_hash(file_hash(self.path), str(self.shape))
        return content_hash(*(f"{file.name}:{file_hash(file)};" for file in _images_of(self.path)), str(self.shape))


def open_clip(path: Path, name: str, clips: ClipFormat = ClipFormat()) -> ClipFile:  # noqa: B008
    """Read a clip's header. Frames beside a video (clip/ or clip.npy for clip.mp4) are taken in its place."""
    beside = [path.with_suffix(""), path.with_suffix(".npy")] if path.suffix in _CONTAINERS else []
    path = next((other for other in beside if other.exists()), path)
    if not path.exists():
        raise BadRow("without a video", f"there is no video {path}.")
    available, *own_size = _header(path)
    frames = available if clips.frames is None else min(available, clips.frames)
    height, width = clips.size or own_size
    size = 3 * frames * height * width
    if size > MAX_CLIP_BYTES:
        raise BadRow(
            "too large a video",
            f"the video {path} has {frames} frames of {height} x {width} pixels, {format_bytes(size)}: at most"
            f" {format_bytes(MAX_CLIP_BYTES)} are read. Take fewer frames or a smaller size.",
        )
    return ClipFile(path, name, (frames, height, width), sum(file.stat().st_size for file in _files_of(path)))


def to_float(clip: UInt8[Tensor, "3 frames height width"]) -> Float[Tensor, "3 frames height width"]:
    """Bytes to -1..1."""
    return clip.float() / 127.5 - 1


def _files_of(path: Path) -> list[Path]:
    return _images_of(path) if path.is_dir() else [path]


def _images_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if not file.name.startswith("."))


def _cover(frame: UInt8[Tensor, "3 from_height from_width"], size: tuple[int, int]) -> UInt8[Tensor, "3 height width"]:
    """Scaled until it covers the size, without distortion, and cropped to its center."""
    height, width = frame.shape[1:]
    scale = max(size[0] / height, size[1] / width)
    scaled = (round(height * scale), round(width * scale))
    if max(scaled) > MAX_FRAME_PIXELS // min(scaled):
        raise BadRow(
            "too large a video", f"a frame of {height} x {width} would be scaled to {scaled[0]} x {scaled[1]} pixels."
        )
    if scaled != (height, width):
        resized = torch.nn.functional.interpolate(
            frame[None].float(), size=scaled, mode="bilinear", antialias=True, align_corners=False
        )
        frame = resized[0].round().clamp(0, 255).byte()
    top, left = ((have - want) // 2 for have, want in zip(scaled, size, strict=True))
    return frame[:, top : top + size[0], left : left + size[1]]


def _header(path: Path) -> tuple[int, int, int]:
    """Frames, height and width; no frame is decoded."""
    with _reading(path):
        if path.is_dir():
            images = _images_of(path)
            if not images:
                raise ValueError("the folder is empty")
            with _image(images[0]) as image:
                return len(images), image.height, image.width
        if path.suffix == ".npy":
            return _array(path).shape[:3]
        if path.suffix in _CONTAINERS:
            with _video(path, skip_frame="all") as (container, stream):
                # not in all headers; else packets are counted, each of which is a frame
                frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
                return frames, stream.codec_context.height, stream.codec_context.width
        with _image(path) as image:
            return getattr(image, "n_frames", 1), image.height, image.width


def _decode(path: Path) -> Iterator[Frame]:
    with _reading(path):
        if path.is_dir():
            for file in _images_of(path):
                with _image(file) as image:
                    yield np.asarray(image.convert("RGB"))
        elif path.suffix == ".npy":
            yield from _array(path)
        elif path.suffix in _CONTAINERS:
            with _video(path) as (container, stream):
                for frame in container.decode(stream):
                    _check_frame(frame.height, frame.width)  # it may change in the middle
                    yield frame.to_ndarray(format="rgb24")
        else:
            from PIL import ImageSequence

            with _image(path) as image:
                yield from (np.asarray(each.convert("RGB")) for each in ImageSequence.Iterator(image))


def _check_frame(height: int, width: int) -> None:
    if height < 1 or width < 1 or height * width > MAX_FRAME_PIXELS:
        raise ValueError(f"a frame has {height} x {width} pixels, and at most {MAX_FRAME_PIXELS:,} are read")


def _array(path: Path) -> Frame:
    """[frames, height, width, 3] bytes of a .npy file, mapped: its header cannot promise more than the file has."""
    open_regular(path, follow_links=True).close()
    frames = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8:
        raise ValueError(f"its numbers are {getattr(frames, 'dtype', 'in several arrays')}, not bytes from 0 to 255")
    if frames.ndim != 4 or frames.shape[-1] != 3 or not frames.size:
        raise ValueError(f"it has shape {list(frames.shape)}, and must be [frames, height, width, 3] bytes")
    _check_frame(*frames.shape[1:3])
    return frames


@contextmanager
def _image(path: Path) -> Iterator[Any]:
    """An image of which only the header was read."""
    from PIL import Image

    with warnings.catch_warnings():  # sizes are checked here, with our limit
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with open_regular(path, follow_links=True) as file, Image.open(file, formats=_IMAGE_FORMATS) as image:
            _check_frame(image.height, image.width)
            yield image


@contextmanager
def _video(path: Path, **options: str) -> Iterator[tuple[Any, Any]]:
    """A container and its first video stream, with options of FFmpeg's decoders."""
    try:
        import av
    except ImportError as error:
        raise ImportError("PyAV, which reads videos, is not there: pip install av") from error

    options |= {"max_pixels": str(MAX_FRAME_PIXELS)}
    # an open file, not a path: what is in it has no way to another one
    with (
        open_regular(path, follow_links=True) as file,
        av.open(file, format=_CONTAINERS[path.suffix], options=options) as container,
    ):
        if not container.streams.video:
            raise ValueError("it has no video stream")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise ValueError("its codec is not known")
        _check_frame(stream.codec_context.height, stream.codec_context.width)
        yield container, stream


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever a damaged file makes its reader raise becomes a BadRow."""
    unreadable = partial(_unreadable, path)
    try:
        yield
    except (*_BROKEN, ImportError) as error:  # PyAV's errors are among them
        raise unreadable(error) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("av", "PIL"):  # FFmpegError, DecompressionBombError
            raise unreadable(error) from error
        raise


def _unreadable(path: Path, error: Exception) -> BadRow:
    return BadRow(
        "unreadable video",
        f"the video {path} cannot be read ({str(error).rstrip('.')}): write it as .mp4, a folder of images (ffmpeg -i"
        " clip.mp4 clip/%05d.png), .gif or .npy.",
    )
