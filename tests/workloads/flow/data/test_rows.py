"""Conditions from files: what is read, and lines that are refused."""

import json
import os

import numpy as np
import pytest
import torch

import groupwise as gw
from groupwise.data.rows import RowFilter
from groupwise.workloads.flow.data.cameras import motion_to_pose
from groupwise.workloads.flow.data.rows import read_conditions


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ('{"video": "clip.npy"}', r"lines.jsonl, line 1: it has no column 'prompt'"),
        ('{"prompt": 3}', "its prompt is int: it must be a text"),
        ('{"prompt": "", "video": "nowhere.gif"}', "there is no video"),
        ('{"prompt": "", "video": "clip.mp4"}', r"clip\.mp4 cannot be read .*ffmpeg -i clip\.mp4 clip/%05d\.png"),
        ('{"prompt": "", "camera": "nowhere.npy"}', "cannot be read"),
        ('{"prompt": "", "camera": [[1, 2], [3]]}', "cannot be read"),
        ('{"prompt": "", "video": 3}', "its video is 3: it must be the path of a file or folder"),
        ('{"prompt": "", "video": "noise.npy"}', r"noise\.npy cannot be read"),
        ('{"prompt": "", "video": "noise.png"}', r"noise\.png cannot be read"),
        ('{"prompt": "", "camera": "noise.npy"}', "cannot be read"),
        ('{"prompt": "", "camera": "noise.json"}', "cannot be read"),
        ('{"prompt": "", "camera": 3.5, "video": "empty.npy"}', r"empty\.npy cannot be read"),
        ('{"prompt": "", "camera": "deep.json"}', "nested too deeply"),
        ('{"prompt": "", "camera": "long.npy"}', "at most 100,000 poses"),
        ("", "holds no usable row"),
        ('{"prompt": "", "camera": [[1' + "0" * 400 + "]]}", "cannot be read"),
        ('{"prompt": "", "camera": "pipe.json"}', "not a regular file"),
        ('{"prompt": "", "camera": "pipe.npy"}', "not a regular file"),
        ('{"prompt": "", "camera": "zero.json"}', "not a regular file"),
        ('{"prompt": "", "camera": {"extrinsics": "zero.json", "target": "cam01"}}', "not a regular file"),
        ('{"prompt": "", "video": "pipe.npy"}', "not a regular file"),
        ('{"prompt": "", "video": "pipe.mp4"}', "not a regular file"),
        ('{"prompt": "", "video": "pipe.gif"}', "not a regular file"),
        ('{"prompt": "", "video": "open.npy"}', r"open\.npy cannot be read"),
        ('{"prompt": "", "camera": "open.npy"}', "cannot be read"),
    ],
)
@pytest.mark.timeout(60)
def test_lines_that_are_no_conditions_are_refused(tmp_path, line, message):
    (tmp_path / "lines.jsonl").write_text(line + "\n")
    (tmp_path / "clip.mp4").write_bytes(b"\0\0\0\x20ftypisom")
    (tmp_path / "open.npy").write_bytes(b"\x93NUMPY\x01\0\x01\0(")
    for name in ("pipe.json", "pipe.npy", "pipe.mp4", "pipe.gif"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for name in ("noise.npy", "noise.png", "noise.json"):
        (tmp_path / name).write_bytes(bytes(range(128, 256)))
    (tmp_path / "empty.npy").touch()
    (tmp_path / "deep.json").write_text("[" * 100_000)
    np.lib.format.open_memmap(tmp_path / "long.npy", mode="w+", dtype=np.float32, shape=(1 << 24, 12))
    with pytest.raises(gw.UserError, match=message):
        read_conditions(str(tmp_path / "lines.jsonl"), RowFilter("refuse", "--workload.on-bad-row"))


def test_poses_are_used_as_they_are_given(tmp_path):
    """In training they are relative to the source's first camera: the first one need not be the identity."""
    camera = motion_to_pose(torch.full((2, 6), 0.25)).tolist()
    (tmp_path / "lines.jsonl").write_text(json.dumps({"prompt": "", "camera": camera}))
    (condition,) = read_conditions(str(tmp_path / "lines.jsonl"), RowFilter("refuse", "--x"))
    assert condition.camera.tolist() == camera
