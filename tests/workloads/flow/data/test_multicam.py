"""Poses of MultiCamVideo's camera files are those that ReCamMaster's own loaders make; other files are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny.wan import save_noise_clip
from torch.testing import assert_close

import groupwise as gw
from groupwise.data.rows import BadRow, RowFilter
from groupwise.workloads.flow.data.cameras import check_camera_path
from groupwise.workloads.flow.data.clips import ClipFormat
from groupwise.workloads.flow.data.multicam import target_poses
from groupwise.workloads.flow.data.rows import read_conditions

REFERENCE = Path(__file__).parents[1] / "reference"
FILE = REFERENCE / "camera_extrinsics.json"
POSES = np.load(REFERENCE / "recam_poses.npz")


def test_in_training_poses_are_relative_to_the_camera_of_the_source():
    names = [name for name in POSES.files if name.startswith("train_") and name.endswith("_f32")]
    pairs = [name for name in names if "bf16" not in name]
    assert len(pairs) == 6
    for name in pairs:
        source, target = (f"cam{name.split(kind)[1][:2]}" for kind in ("src", "tgt"))
        poses = target_poses(FILE, target=target, source=source)
        assert np.array_equal(poses.numpy(), POSES[name])
        rounded = POSES[name.replace("_f32", "_bf16_as_f32")]
        assert np.array_equal(poses.bfloat16().float().numpy(), rounded)
        assert (poses[0] - torch.eye(3, 4).flatten()).abs().max() > 0.1  # the two start at different places
        check_camera_path(poses, 21, name)


def test_at_inference_poses_are_relative_to_the_first_of_the_path():
    for number in range(1, 11):
        poses = target_poses(FILE, target=f"cam{number:02d}", frames=81)
        # bit-equal but for the rounding of zeros in the first row, which depends on the machine's BLAS
        expected = torch.from_numpy(POSES[f"infer_cam{number:02d}_f32"])
        assert_close(poses, expected, rtol=0, atol=1e-14)
        assert torch.equal(poses[1:], expected[1:])
        rounded = torch.from_numpy(POSES[f"infer_cam{number:02d}_bf16_as_f32"])
        assert_close(poses.bfloat16().float(), rounded, rtol=0, atol=1e-14)
        published = torch.from_numpy(POSES[f"published_example_infer_cam{number:02d}_f32"])
        for path in (poses, published):
            check_camera_path(path, 21, "a test")
            assert (path[0] - torch.eye(3, 4).flatten()).abs().max() < 1e-9


def test_a_pose_by_hand(tmp_path):
    """A camera that looks along x moves 2 m forward and 1 m up: in its own axes 2 m along z and 1 m against y."""
    home, moved = ("[1 0 0 0] [0 1 0 0] [0 0 1 0] [100 0 0 1] ", "[1 0 0 0] [0 1 0 0] [0 0 1 0] [300 -0 1e2 1] ")
    frames = {f"frame{index}": {"cam01": home if index < 4 else moved} for index in range(5)}
    (tmp_path / "cameras.json").write_text(json.dumps(frames))
    poses = target_poses(tmp_path / "cameras.json", target="cam01").view(2, 3, 4)
    assert torch.equal(poses[:, :, :3], torch.eye(3).expand(2, 3, 3))
    assert poses[:, :, 3].tolist() == [[0, 0, 0], [0, -1, 2]]


MIRRORED = "[1 0 0 0] [0 1 0 0] [0 0 -1 0] [0 0 0 1] "
STRETCHED = "[1 0 0 0] [0 1 0 0] [0 0 3 0] [0 0 0 1] "
BAD = [
    ({"frame0": {"cam01": MIRRORED}}, r"cam01 of .* is mirrored in frame 0"),
    ({"frame0": {"cam01": STRETCHED}}, r"no rotation \(R R\^T differs from 1 by 8\)"),
    ({"frame0": {"cam01": "[1 2] [3]"}}, "is not three axes"),
    ({"frame0": {"cam02": MIRRORED}}, "has no camera 'cam01' in each frame: its first frame has cam02"),
    ({"frame1": {"cam01": MIRRORED}}, "its keys must be frame0"),
    ([1], "it holds list"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / "cameras.json").write_text(json.dumps(content))
    with pytest.raises(BadRow, match=message):
        target_poses(tmp_path / "cameras.json", target="cam01")


def save_scene(folder: Path, clips=("cam01", "cam02", "cam03")) -> Path:
    """A folder as MultiCamVideo has it, with videos as arrays of frames."""
    scene = folder / "train" / "f18_aperture10" / "scene1"
    for name in ("videos", "cameras"):
        (scene / name).mkdir(parents=True)
    (scene / "cameras" / "camera_extrinsics.json").write_text(FILE.read_text())
    for number, clip in enumerate(clips, start=5):
        save_noise_clip(scene / "videos" / f"{clip}.npy", number)
    rows = [f"f18_aperture10/scene1/videos/{clip}.mp4,a street with {clip}" for clip in clips]
    (folder / "metadata.csv").write_text("\n".join(["file_name,text", *rows]) + "\n")
    return folder


def test_the_dataset_is_read_from_its_folder(tmp_path):
    folder = save_scene(tmp_path)
    conditions = read_conditions(str(folder), RowFilter("refuse", "--x"), ClipFormat((16, 16), frames=5))
    assert [condition.prompt for condition in conditions] == [f"a street with cam0{index}" for index in (1, 2, 3)]
    for index, condition in enumerate(conditions, start=1):
        source = condition.source_file.path.stem
        assert source != f"cam0{index}"
        assert torch.equal(condition.camera, target_poses(FILE, target=f"cam0{index}", source=source)[:2])
    header, *rows = (folder / "metadata.csv").read_text().splitlines()
    named = [f"{header},source", *(f"{row},{source}" for row, source in zip(rows, ("cam03", "", ""), strict=True))]
    (folder / "metadata.csv").write_text("\n".join(named))
    first = read_conditions(str(folder), RowFilter("refuse", "--x"), ClipFormat((16, 16), frames=5))[0]
    assert torch.equal(first.camera, target_poses(FILE, target="cam01", source="cam03")[:2])


CLIP = "f18_aperture10/scene1/videos/cam01.mp4"
BAD_METADATA = [
    (f"file_name,text\n{CLIP},a street, with cars\n", r"line 2: it has 3 values for the 2 columns file_name, text"),
    (f"file_name,text,weather\n\n{CLIP},a street\n", r"line 3: it has 2 values for the 3 columns"),
    ("file_name,text\n,a street\n", "its file_name is empty: it must be the path of a clip below train/"),
    (f"file_name,text,source\n{CLIP},,../cam02\n", r"its source is '\.\./cam02': it must be the name of a camera"),
    (f'file_name,text\n{CLIP},"a street\n{CLIP},a wall\n', "line 3 is not CSV .* must end with one"),
    (f'file_name,text\n{CLIP},"a street" in rain\n', "line 2 is not CSV .* written twice"),
    (f"file_name,caption\n{CLIP},a street\n", "columns 'file_name', 'caption': it needs file_name and text"),
    ("", "has the columns none: it needs file_name and text"),
    ("file_name,text\n", "holds a header alone.* Add at least one"),
    ("file_name,text\n,Stra\xdfe\n".encode("latin-1"), "the byte 0xdf .* must be UTF-8. Save it"),
    ("file_name,text\n".encode("utf-16"), "must be UTF-8"),
]


@pytest.mark.parametrize(("content", "message"), BAD_METADATA)
def test_metadata_that_cannot_be_used_is_refused(tmp_path, content, message):
    folder = save_scene(tmp_path)
    (folder / "metadata.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(gw.UserError, match=message) as refused:
        read_conditions(str(folder), RowFilter("refuse", "--x"))
    assert "\n" not in str(refused.value)


def test_metadata_of_a_spreadsheet_is_read_and_bad_rows_are_skipped(tmp_path):
    """A byte order mark, CRLF, quoted commas, quotes and line ends; `skip` leaves a bad row out."""
    folder, row_filter = save_scene(tmp_path), RowFilter("skip", "--x")
    rows = ["file_name,text,weather", f"{CLIP},a street, with cars,dry", f'{CLIP},"a ""wet"" street,\nat night",rain']
    (folder / "metadata.csv").write_bytes("\r\n".join(rows).encode("utf-8-sig"))
    (condition,) = read_conditions(str(folder), row_filter)
    assert condition.prompt == 'a "wet" street,\nat night'
    assert condition.reward_columns == {"weather": "rain"}
    assert row_filter.skipped == {"row of another length": 1}


def test_rows_name_a_camera_file_and_its_cameras(tmp_path):
    line = {"prompt": "", "camera": {"extrinsics": str(FILE), "target": "cam05", "source": "cam02"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(line) + "\n")
    (condition,) = read_conditions(str(tmp_path / "rows.jsonl"), RowFilter("refuse", "--x"))
    assert torch.equal(condition.camera, target_poses(FILE, target="cam05", source="cam02"))
    for camera, message in (
        ({"extrinsics": str(FILE)}, "where source may be left out"),
        ({"extrinsics": str(FILE), "target": 3}, "where source may be left out"),
        ({"extrinsics": "nowhere.json", "target": "cam01"}, "cannot be read"),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "", "camera": camera}))
        with pytest.raises(gw.UserError, match=message):
            read_conditions(str(tmp_path / "rows.jsonl"), RowFilter("refuse", "--x"))


POSE = "[1 0 0 0] [0 1 0 0] [0 0 1 0] [1 2 3 1]"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"", "it needs file_name and text"),
        (b"file_name,text\n", "holds a header alone"),
        (b"file_name,text\nf/s/videos/cam01.mp4,\xff\n", "it must be UTF-8"),
        (b"file_name,text\nf/s/videos/cam01.mp4," + b"x" * 200_000, "line 2 is not CSV"),
        (b"file_name,text\n/,x\n", "the video / cannot be read"),
        (b"file_name,text,source\nf/s/videos/cam01.mp4,x,a/b\n", "must be the name of a camera"),
    ],
)
def test_a_table_of_any_content_is_refused(tmp_path, table, message):
    (tmp_path / "metadata.csv").write_bytes(table)
    with pytest.raises(gw.UserError, match=message):
        read_conditions(str(tmp_path), RowFilter("refuse", "workload.on_bad_row"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", [POSE.replace("3 1]", "3 0]"), POSE.replace("[1 2", "[inf 2"), "[" * 40_000, 5])
def test_a_pose_of_any_content_is_refused(tmp_path, text):
    (tmp_path / "cameras.json").write_text(json.dumps({"frame0": {"cam01": text}}))
    with pytest.raises(BadRow, match="is not three axes"):
        target_poses(tmp_path / "cameras.json", target="cam01")
