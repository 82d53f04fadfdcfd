"""What a pipeline is not built from: sizes that do not fit, other folders, lines that are no conditions."""

import json
import math

import pytest
import torch

import groupwise as gw
from groupwise.data.rows import RowFilter
from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.workloads.flow.cameras import motion_to_pose
from groupwise.workloads.flow.config import TrainConfig
from groupwise.workloads.flow.data import read_clip, read_conditions
from groupwise.workloads.flow.tasks.pipelines import Sd3Config
from workloads.flow.small import CPU
from workloads.flow.tiny_folders import clip_file
from workloads.flow.tiny_pipelines import WARMTH, recam

BAD = [
    ({"frames": 6}, "workload.frames is 6.*Take 5 or 9"),
    ({"frames": 9}, "has 5 frames .* it needs 9"),
    ({"height": 20}, "workload.height is 20.*Take 16 or 24"),
    ({"height": 24}, "height is 3, which the transformer's patches of 2 do not divide.*2 or 4"),
    ({"rewards": RewardFunctionsConfig()}, "nothing to learn from"),
    ({"data": None}, "workload.data is not given"),
    ({"train": TrainConfig(lora_targets=("nothing",))}, "no layer of WanTransformer3DModel"),
]


@pytest.mark.parametrize(("settings", "said"), BAD)
def test_what_does_not_fit_is_refused_before_anything_runs(wan, data, settings, said):
    with pytest.raises(gw.UserError, match=said):
        recam(wan, data, **settings).build(CPU)


def test_other_folders_are_refused(wan, data, tmp_path):
    with pytest.raises(gw.UserError, match=r"no model_index\.json"):
        recam(tmp_path, data).build(CPU)
    with pytest.raises(
        gw.UserError, match="holds a WanPipeline, but this model is loaded from a StableDiffusion3Pipeline"
    ):
        Sd3Config(pipeline=wan, data=data, rewards=WARMTH).build(CPU)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ('{"video": "clip.npy"}', r"lines.jsonl, line 1: it has no column 'prompt'"),
        ('{"prompt": 3}', "its prompt is int: it must be a text"),
        ('{"prompt": "", "video": "nowhere.gif"}', "there is no video"),
        ('{"prompt": "", "video": "clip.mp4"}', r"clip\.mp4 cannot be read .*ffmpeg -i clip\.mp4 clip/%05d\.png"),
        ('{"prompt": "", "camera": "nowhere.npy"}', "cannot be read"),
        ('{"prompt": "", "camera": [[1, 2], [3]]}', "cannot be read"),
        ("", "holds no usable row"),
    ],
)
def test_lines_that_are_no_conditions_are_refused(tmp_path, line, said):
    (tmp_path / "lines.jsonl").write_text(line + "\n")
    (tmp_path / "clip.mp4").write_bytes(b"\0\0\0\x20ftypisom")
    with pytest.raises(gw.UserError, match=said):
        read_conditions(str(tmp_path / "lines.jsonl"), RowFilter("refuse", "--workload.on-bad-row"))


def test_bad_rows_are_skipped_and_counted(wan, data):
    lines = data.with_name("lines.jsonl")
    lines.write_text(data.read_text() + '{"prompt": "", "video": "nowhere.gif"}\n{\n')
    with pytest.raises(gw.UserError, match=r"line 6: it is not JSON .*set --workload.on-bad-row to 'skip'"):
        recam(wan, lines).build(CPU)
    workload = recam(wan, lines, on_bad_row="skip").build(CPU)
    assert workload.num_conditions == 4
    assert "rows of data skipped: 1 broken line, 1 without a video; 4 are left" in workload.reporter.preflight_notes()


def test_cameras_of_the_wrong_length_or_with_nan_are_refused(wan, data, tmp_path):
    clip_file(tmp_path / "clip.npy", 5)
    for frames, hole, said in ((3, False, "has 3 poses for 2 frames"), (2, True, "holds nan in frame")):
        path = motion_to_pose(torch.zeros(frames, 6))
        if hole:
            path[1, 3] = math.nan
        line = json.dumps({"prompt": "", "video": "clip.npy", "camera": path.tolist()})
        (tmp_path / "lines.jsonl").write_text(line)
        with pytest.raises(gw.UserError, match=said):
            recam(wan, tmp_path / "lines.jsonl").build(CPU)


def test_clips_are_read_from_gifs_and_folders_alike(tmp_path):
    from PIL import Image

    frames = [Image.new("RGB", (8, 8), (40 * nth, 0, 255)) for nth in range(3)]
    frames[0].save(tmp_path / "clip.gif", save_all=True, append_images=frames[1:])
    (tmp_path / "frames").mkdir()
    for nth, frame in enumerate(frames):
        frame.save(tmp_path / "frames" / f"{nth}.png")
    pictures, movie = read_clip(tmp_path / "frames"), read_clip(tmp_path / "clip.gif", size=(4, 4))
    assert pictures.shape == (3, 3, 8, 8)
    assert pictures[0, :, 0, 0].tolist() == pytest.approx([-1, 40 / 127.5 - 1, 80 / 127.5 - 1])
    assert movie.shape == (3, 3, 4, 4)
    assert movie[2].min() > 0.98
