"""Camera paths: poses by hand, and paths that are refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import groupwise as gw
from groupwise.workloads.flow.data.cameras import (
    check_camera_path,
    join_pose,
    motion_to_pose,
    split_pose,
)
from groupwise.workloads.flow.data.multicam import relative_poses

NUMBERS = st.floats(-1.2, 1.2)
MOTIONS = st.lists(st.lists(NUMBERS, min_size=6, max_size=6), min_size=2, max_size=5).map(torch.tensor)


def turned(angle, translation=(0.0, 0.0, 0.0)):
    return motion_to_pose(torch.tensor([[0.0, 0.0, angle, *translation]], dtype=torch.float64))


def test_poses_by_hand():
    rotation, translation = split_pose(turned(math.pi / 2, (1.0, 2.0, 3.0)))
    assert_close(rotation[0], torch.tensor([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.float64))
    assert translation.tolist() == [[1, 2, 3]]


@given(MOTIONS)
def test_rotations_are_rotations(motions):
    path = motion_to_pose(motions.double())
    rotation, _ = split_pose(path)
    assert_close(rotation @ rotation.mT, torch.eye(3, dtype=torch.float64).expand_as(rotation), atol=1e-6, rtol=0)
    check_camera_path(path, len(path), "a test")


def square(path):
    """As 4x4 matrices."""
    return np.stack([np.vstack([pose, [0, 0, 0, 1]]) for pose in path.view(-1, 3, 4).numpy()])


@given(MOTIONS, st.lists(NUMBERS, min_size=6, max_size=6).map(torch.tensor))
def test_another_world_frame_is_the_same_path(motions, elsewhere):
    path = motion_to_pose(motions.double())
    (outer, origin), (rotation, translation) = split_pose(motion_to_pose(elsewhere.double()[None])), split_pose(path)
    moved = join_pose(outer @ rotation, (outer @ translation[..., None])[..., 0] + origin)
    ours, theirs = (relative_poses(square(poses), square(poses)[0]) for poses in (moved, path))
    assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert_close(ours[0], torch.eye(3, 4).flatten(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("camera", "message"),
    [
        (torch.zeros(5, 3, 4), r"shape \[5, 3, 4\]: it must be \[frames, 12\]"),
        (motion_to_pose(torch.zeros(4, 6)), "has 4 poses for 5 frames"),
        (motion_to_pose(torch.zeros(5, 6)).index_fill(0, torch.tensor([3]), math.nan), "holds nan in frame 3"),
        (-motion_to_pose(torch.zeros(5, 6)), r"in frame 0: .* \(it is mirrored\)"),
        (2 * motion_to_pose(torch.zeros(5, 6)), "is not a rigid motion in frame 0"),
        (motion_to_pose(torch.zeros(5, 6)).index_fill(0, torch.tensor([3]), 0), "is not a rigid motion in frame 3"),
    ],
)
def test_invalid_camera_paths_are_refused(camera, message):
    with pytest.raises(gw.UserError, match=message):
        check_camera_path(camera, 5, "clip 7")
