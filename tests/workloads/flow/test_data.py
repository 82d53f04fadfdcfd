"""Conditions from files: what is read, and lines that are refused."""

import pytest

import groupwise as gw
from groupwise.workloads.flow.data import read_clip, read_conditions


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ('{"video": "clip.npy"}', "has no prompt"),
        ('{"prompt": "", "video": "nowhere.gif"}', "There is no video"),
        ('{"prompt": "", "video": "clip.mp4"}', r"clip\.mp4 cannot be read .*ffmpeg -i clip\.mp4 clip/%05d\.png"),
        ('{"prompt": "", "camera": "nowhere.npy"}', "cannot be read"),
        ('{"prompt": "", "camera": [[1, 2], [3]]}', "cannot be read"),
        ("", "holds no condition"),
    ],
)
def test_lines_that_are_no_conditions_are_refused(tmp_path, line, message):
    (tmp_path / "lines.jsonl").write_text(line + "\n")
    (tmp_path / "clip.mp4").write_bytes(b"\0\0\0\x20ftypisom")
    with pytest.raises(gw.UserError, match=message):
        read_conditions(tmp_path / "lines.jsonl")


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
