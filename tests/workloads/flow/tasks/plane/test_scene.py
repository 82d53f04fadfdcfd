"""The embedded scene, by hand."""

import pytest
import torch
from torch.testing import assert_close

import groupwise as gw
from groupwise.workloads.flow.cameras import motion_to_pose
from groupwise.workloads.flow.tasks.plane.config import SIDE
from groupwise.workloads.flow.tasks.plane.scene import Scenes, draw_scenes, encode_prompts, project_to_plane


def test_projection_by_hand():
    still, nearer, aside = (
        project_to_plane(motion_to_pose(torch.tensor([[0.0, 0, 0, *move]])))[0]
        for move in ((0, 0, 0), (0, 0, 0.5), (0.1, 0, 0))
    )
    corner = 1 - 1 / SIDE
    assert_close(still[0], torch.tensor([-corner, -corner]))
    assert_close(nearer, still / 2)  # at half the distance the frame spans half as much
    assert_close(aside, still + torch.tensor([0.1, 0.0]))
    # turned about the vertical axis, the middle looks at tan(angle)
    turned = project_to_plane(motion_to_pose(torch.tensor([[0.0, 0.2, 0, 0, 0, 0]])))[0].view(SIDE, SIDE, 2)
    middle = turned[SIDE // 2 - 1 : SIDE // 2 + 1, SIDE // 2 - 1 : SIDE // 2 + 1, 0].mean()
    assert middle.item() == pytest.approx(torch.tan(torch.tensor(0.2)).item(), abs=0.01)


def test_the_gradient_of_the_texture_is_autograds():
    points = torch.rand(12, 9, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    scenes = Scenes(draw_scenes(3, torch.arange(12)).phase.double())
    colors = scenes.texture(points)
    (gradient,) = torch.autograd.grad(colors[..., 1].sum(), points)
    assert_close(scenes.texture_gradient(points.detach())[:, :, 1], gradient)


def test_prompts_are_one_hot_words_and_unknown_ones_are_refused():
    assert encode_prompts(["by day", ""]).argmax(-1).tolist() == [[1, 3], [0, 0]]
    with pytest.raises(gw.UserError, match="The prompt is 'at noon'"):
        encode_prompts(["at noon"])
