"""The embedded scene, by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

import groupwise as gw
from groupwise.workloads.flow.data.cameras import motion_to_pose
from groupwise.workloads.flow.tasks.sprites.config import FRAMES
from groupwise.workloads.flow.tasks.sprites.scene import (
    draw_motions,
    draw_scenes,
    encode_prompts,
    floor_pattern,
    project_to_plane,
    sprite_distances,
)


def test_projection_by_hand():
    still, nearer, aside = (
        project_to_plane(motion_to_pose(torch.tensor([[0.0, 0, 0, *move]])), 8)[0]
        for move in ((0, 0, 0), (0, 0, 0.5), (0.1, 0, 0))
    )
    assert_close(still[0], torch.tensor([-7 / 8, -7 / 8]))
    assert_close(nearer, still / 2)  # at half the distance the frame spans half as much
    assert_close(aside, still + torch.tensor([0.1, 0.0]))
    # rolled by a quarter, the picture's right is the scene's down
    rolled = project_to_plane(motion_to_pose(torch.tensor([[0.0, 0, math.pi / 2, 0, 0, 0]])), 8)[0]
    assert_close(rolled, torch.stack([-still[:, 1], still[:, 0]], dim=-1))


def test_distances_into_the_sprites_by_hand():
    centers = torch.tensor([[[0.5, 0.0], [-0.5, 0.0], [0.0, 0.5]]])
    at_centers, above = centers[:, None], centers[:, None] - torch.tensor([0.0, 0.4])
    inside, outside = (sprite_distances(centers, points)[0, :, 0] for points in (at_centers, above))
    # to the nearest side: the disc's radius, half the square, the triangle's inscribed circle
    assert_close(inside.diagonal(), torch.tensor([0.3, 0.264, 0.186]))
    # 0.4 above the centers: the triangle's tip is 2 x 0.186 above its own, its sides slope by 60 degrees
    assert_close(outside.diagonal(), torch.tensor([-0.1, -0.136, 0.186 - 0.2]))


def test_the_floor_repeats():
    points = torch.tensor([[0.3, 0.3], [0.9, 0.3], [0.9, 0.9], [1.5, 0.3], [0.0, 0.7]])
    assert_close(floor_pattern(points), torch.tensor([1.0, -1.0, 1.0, 1.0, 0.0]))


def test_scenes_and_motions_are_functions_of_their_number_and_within_their_limits():
    numbers = torch.arange(500)
    scenes, motions = draw_scenes(3, numbers), draw_motions(3, numbers)
    assert torch.equal(draw_scenes(3, numbers[7:9]), scenes[7:9])
    assert torch.equal(draw_motions(3, numbers[7:9]), motions[7:9])
    gaps = torch.cdist(scenes, scenes) + 9 * torch.eye(3)
    assert gaps.min() > 0.67  # 2 x 0.45 x sin((120 degrees - 0.4) / 2): disc and square together reach 0.3 + 0.37
    assert motions.shape == (500, FRAMES, 6)
    assert not motions[:, 0].any()
    assert not motions[:, :, :2].any()
    end = motions[:, -1]
    across = end[:, 3:5].norm(dim=1)
    assert 0.25 <= across.min() <= across.max() <= 0.5
    assert end[:, 2].abs().max() <= 0.5
    assert end[:, 5].abs().max() <= 0.25


def test_prompts_are_one_hot_words_and_unknown_ones_are_refused():
    assert encode_prompts(["by day", ""]).argmax(-1).tolist() == [[1, 3], [0, 0]]
    with pytest.raises(gw.UserError, match="The prompt is 'at noon'"):
        encode_prompts(["at noon"])
