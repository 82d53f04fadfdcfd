"""Clips from files: the header when conditions are read, frames when they are needed, and hostile files."""

import json
import os
import struct
import zlib

import av
import numpy as np
import pytest
import torch
from PIL import Image

import groupwise as gw
from groupwise.data.file_hash import file_hash
from groupwise.data.rows import BadRow, RowFilter
from groupwise.workloads.flow.data.clips import MAX_FRAME_PIXELS, ClipFormat, open_clip
from groupwise.workloads.flow.data.rows import read_conditions
from groupwise.workloads.flow.rewards import SourceClips
from groupwise.workloads.flow.task import group_ids


def read(path, size=None, frames=None):
    return open_clip(path, path.name, ClipFormat(size, frames)).read()


def save_video(path, frames, side=32):
    """Frame `index` is gray of brightness 20 x index."""
    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4" if path.suffix != ".webm" else "libvpx-vp9", rate=8)
        stream.width, stream.height, stream.pix_fmt = side, side, "yuv420p"
        for index in range(frames):
            pixels = np.full((side, side, 3), 20 * index, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def test_clips_are_read_from_gifs_and_folders_alike(tmp_path):
    frames = [Image.new("RGB", (8, 8), (40 * index, 0, 255)) for index in range(3)]
    frames[0].save(tmp_path / "clip.gif", save_all=True, append_images=frames[1:])
    (tmp_path / "frames").mkdir()
    for index, frame in enumerate(frames):
        frame.save(tmp_path / "frames" / f"{index}.png")
    images, movie = read(tmp_path / "frames"), read(tmp_path / "clip.gif", size=(4, 4))
    assert images.dtype == torch.uint8
    assert images.shape == (3, 3, 8, 8)
    assert images[0, :, 0, 0].tolist() == [0, 40, 80]
    assert movie.shape == (3, 3, 4, 4)
    assert movie[2].min() > 252


def test_clips_are_cropped_to_the_center_not_distorted(tmp_path):
    """8 x 8 to 2 x 4: scaled by max(2/8, 4/8) to 4 x 4, of which the middle two rows are kept."""
    frames = np.zeros((1, 8, 8, 3), dtype=np.uint8)
    frames[:, 2:6], frames[:, :, 6:] = 255, 0
    np.save(tmp_path / "clip.npy", frames)
    clip = read(tmp_path / "clip.npy", size=(2, 4))
    assert clip.shape == (3, 1, 2, 4)
    assert clip[..., :3].min() > 178
    assert clip[..., 3].max() < 76


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".webm"])
def test_videos_are_read_as_far_as_they_are_needed(tmp_path, suffix):
    video = save_video(tmp_path / f"clip{suffix}", 9)
    clip = open_clip(video, "clip", ClipFormat((16, 16), 5))
    assert clip.shape == (5, 16, 16)
    brightness = clip.read().float().mean((0, 2, 3))
    assert brightness.tolist() == pytest.approx([0, 20, 40, 60, 80], abs=3)
    assert clip.read(frames=2).shape == (3, 2, 16, 16)
    assert open_clip(video, "clip").shape == (9, 32, 32)


def test_conditions_hold_no_pixels_and_read_them_when_asked(tmp_path):
    video = save_video(tmp_path / "clip.mp4", 5)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "", "video": "clip.mp4"}) + "\n")
    (condition,) = read_conditions(str(tmp_path / "rows.jsonl"), RowFilter("refuse", "--x"), ClipFormat((16, 16), 5))
    assert condition.source_clip is None
    assert condition.source_shape == (3, 5, 16, 16)
    sources = SourceClips([condition] * 3)
    assert torch.equal(sources[2], condition.read_source())
    assert [len(sources), len(sources[1:])] == [3, 2]
    video.write_bytes(b"")
    assert sources[0].shape == (3, 5, 16, 16)  # kept by the rows of the group
    with pytest.raises(gw.UserError, match=r"After 0 of 5 frames: the video .*clip\.mp4 cannot be read"):
        condition.read_source()


def test_ids_of_groups_are_made_without_reading_clips(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "", "video": "a.npy"}\n{"prompt": "", "video": "b.npy"}\n')
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.zeros((2, 4, 4, 3), dtype=np.uint8))
    first = group_ids(read_conditions(str(rows), RowFilter("refuse", "--x")))
    np.save(tmp_path / "b.npy", np.zeros((3, 4, 4, 3), dtype=np.uint8))
    second = group_ids(read_conditions(str(rows), RowFilter("refuse", "--x")))
    assert (first == second).tolist() == [True, False]


def test_the_content_key_follows_the_bytes_and_the_shape(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 4, 4, 3), dtype=np.uint8))
    np.save(tmp_path / "b.npy", np.zeros((2, 4, 4, 3), dtype=np.uint8))
    np.save(tmp_path / "c.npy", np.ones((2, 4, 4, 3), dtype=np.uint8))
    keys = [open_clip(tmp_path / f"{name}.npy", name).content_key() for name in "abc"]
    assert keys[0] == keys[1] != keys[2]
    assert open_clip(tmp_path / "a.npy", "a", ClipFormat(frames=1)).content_key() != keys[0]


def test_a_file_is_hashed_again_only_after_it_changed(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    os.utime(path, (1000, 1000))
    first = file_hash(path)
    path.write_bytes(b"two")
    os.utime(path, (1000, 1000))
    assert file_hash(path) == first  # the same size and time: not read
    os.utime(path, (2000, 2000))
    assert file_hash(path) != first


def png_of(width, height):
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))


def npy_header(shape, dtype="|u1"):
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


HOSTILE = {
    "bomb.png": (png_of(30_000, 30_000), "30000 x 30000 pixels|exceeds limit"),
    "wide.png": (png_of(9_000, 9_000), f"9000 x 9000 pixels, and at most {MAX_FRAME_PIXELS:,}"),
    "promise.npy": (npy_header((1 << 20, 4096, 4096, 3)), "cannot be read"),
    "pickle.npy": (npy_header((1,), "|O") + b"cos\nsystem\n(S'true'\ntR.", "cannot be read"),
    "floats.npy": (npy_header((1, 1, 1, 3), "<f4") + bytes(12), "not bytes from 0 to 255"),
    "playlist.mp4": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n", "cannot be read"),
    "text.mkv": (b"ffconcat version 1.0\nfile other.mkv\n", "cannot be read"),
    "script.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_before_anything_is_allocated(tmp_path, name):
    content, message = HOSTILE[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadRow, match=message):
        open_clip(tmp_path / name, name)


def test_a_clip_that_is_too_large_in_all_is_refused(tmp_path):
    np.lib.format.open_memmap(tmp_path / "long.npy", mode="w+", dtype=np.uint8, shape=(1 << 14, 512, 512, 3))
    with pytest.raises(BadRow, match=r"16384 frames of 512 x 512 pixels, 12\.0 GiB: at most 4\.0 GiB"):
        open_clip(tmp_path / "long.npy", "long")
    assert open_clip(tmp_path / "long.npy", "long", ClipFormat((64, 64), 5)).read().shape == (3, 5, 64, 64)


def refuses(path):
    try:
        read(path)
    except (BadRow, gw.UserError) as error:
        return "\n" not in str(error)
    return False


def test_damaged_videos_end_in_one_paragraph(tmp_path):
    """Cut and flipped at each tenth: read in part, or refused, never anything else."""
    whole = save_video(tmp_path / "clip.mp4", 9).read_bytes()
    refused = 0
    for tenth in range(1, 10):
        at = len(whole) * tenth // 10
        for damaged in (whole[:at], whole[:at] + bytes(64) + whole[at + 64 :]):
            (tmp_path / "damaged.mp4").write_bytes(damaged)
            refused += refuses(tmp_path / "damaged.mp4")
    assert refused >= 9  # an mp4 that is cut has lost its index
