"""Conditions from files: what is read, and lines that are refused."""

import json

import numpy as np
import pytest
import torch

import groupwise as gw
from groupwise.data.rows import RowFilter
from groupwise.workloads.flow.cameras import motion_to_pose
from groupwise.workloads.flow.data import read_clip, read_conditions


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
        ("", "holds no usable row"),
    ],
)
def test_lines_that_are_no_conditions_are_refused(tmp_path, line, message):
    (tmp_path / "lines.jsonl").write_text(line + "\n")
    (tmp_path / "clip.mp4").write_bytes(b"\0\0\0\x20ftypisom")
    for name in ("noise.npy", "noise.png", "noise.json"):
        (tmp_path / name).write_bytes(bytes(range(128, 256)))
    (tmp_path / "empty.npy").touch()
    with pytest.raises(gw.UserError, match=message):
        read_conditions(str(tmp_path / "lines.jsonl"), RowFilter("refuse", "--workload.on-bad-row"))


def test_clips_are_read_from_gifs_and_folders_alike(tmp_path):
    from PIL import Image

    frames = [Image.new("RGB", (8, 8), (40 * index, 0, 255)) for index in range(3)]
    frames[0].save(tmp_path / "clip.gif", save_all=True, append_images=frames[1:])
    (tmp_path / "frames").mkdir()
    for index, frame in enumerate(frames):
        frame.save(tmp_path / "frames" / f"{index}.png")
    images, movie = read_clip(tmp_path / "frames"), read_clip(tmp_path / "clip.gif", size=(4, 4))
    assert images.shape == (3, 3, 8, 8)
    assert images[0, :, 0, 0].tolist() == pytest.approx([-1, 40 / 127.5 - 1, 80 / 127.5 - 1])
    assert movie.shape == (3, 3, 4, 4)
    assert movie[2].min() > 0.98


def test_clips_are_cropped_to_the_center_not_distorted(tmp_path):
    """8 x 8 to 2 x 4: scaled by max(2/8, 4/8) to 4 x 4, of which the middle two rows are kept."""
    frames = np.zeros((1, 8, 8, 3), dtype=np.uint8)
    frames[:, 2:6], frames[:, :, 6:] = 255, 0
    np.save(tmp_path / "clip.npy", frames)
    clip = read_clip(tmp_path / "clip.npy", size=(2, 4))
    assert clip.shape == (3, 1, 2, 4)
    assert (clip[..., :3].min(), clip[..., 3].max()) == (pytest.approx(0.7, abs=0.3), pytest.approx(-0.7, abs=0.3))


def test_poses_are_used_as_they_are_given(tmp_path):
    """In training they are relative to the source's first camera: the first one need not be the identity."""
    camera = motion_to_pose(torch.full((2, 6), 0.25)).tolist()
    (tmp_path / "lines.jsonl").write_text(json.dumps({"prompt": "", "camera": camera}))
    (condition,) = read_conditions(str(tmp_path / "lines.jsonl"), RowFilter("refuse", "--x"))
    assert condition.camera.tolist() == camera
