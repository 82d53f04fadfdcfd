"""The embedded scene, and finding the camera that filmed it."""

import pytest
import torch
from torch.testing import assert_close

import groupwise as gw
from groupwise.workloads.flow.cameras import motion_to_pose, rotation_errors, translation_errors
from groupwise.workloads.flow.tasks.plane.charts import draw_gif, draw_strip
from groupwise.workloads.flow.tasks.plane.rewards import PlaneRewards, estimate_camera
from groupwise.workloads.flow.tasks.plane.scene import (
    LIGHT_LEVELS,
    SIDE,
    Scenes,
    draw_motions,
    draw_scenes,
    encode,
    path_of,
    project_to_plane,
    render_clip,
)
from groupwise.workloads.flow.tasks.plane.task import plane_conditions

NUMBERS = torch.arange(12)
SCENES, MOTIONS = draw_scenes(3, NUMBERS), draw_motions(3, NUMBERS)
CAMERA = path_of(MOTIONS)
CLIPS = render_clip(SCENES, CAMERA)


def test_where_pixels_look_by_hand():
    still, nearer, aside = (
        project_to_plane(motion_to_pose(torch.tensor([[0.0, 0, 0, *move]])))[0]
        for move in ((0, 0, 0), (0, 0, 0.5), (0.1, 0, 0))
    )
    corner = 1 - 1 / SIDE
    assert_close(still[0], torch.tensor([-corner, -corner]))
    assert_close(nearer, still / 2)  # at half the distance the picture spans half as much
    assert_close(aside, still + torch.tensor([0.1, 0.0]))
    # turned about the vertical axis, the middle looks at tan(angle)
    turned = project_to_plane(motion_to_pose(torch.tensor([[0.0, 0.2, 0, 0, 0, 0]])))[0].view(SIDE, SIDE, 2)
    middle = turned[SIDE // 2 - 1 : SIDE // 2 + 1, SIDE // 2 - 1 : SIDE // 2 + 1, 0].mean()
    assert middle.item() == pytest.approx(torch.tan(torch.tensor(0.2)).item(), abs=0.01)


def test_slopes_are_those_of_the_texture():
    places = torch.rand(12, 9, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    scenes = Scenes(SCENES.phase.double())
    painted = scenes.paint(places)
    (slope,) = torch.autograd.grad(painted[..., 1].sum(), places)
    assert_close(scenes.slope(places.detach())[:, :, 1], slope)


def test_the_camera_is_found_to_a_thousandth_and_explains_everything():
    found = estimate_camera(SCENES, CLIPS)
    assert rotation_errors(found.camera, CAMERA).max() < 2e-3
    assert translation_errors(found.camera, CAMERA).max() < 2e-3
    assert found.explained.min() > 0.9999


def test_noise_costs_quality_and_little_accuracy():
    noise = 0.1 * torch.randn(CLIPS.shape, generator=torch.Generator().manual_seed(0))
    found = estimate_camera(SCENES, CLIPS + noise)
    assert rotation_errors(found.camera, CAMERA).mean() < 0.04
    assert 0.8 < found.explained.mean() < 0.99


@pytest.mark.parametrize("clip", [CLIPS * 0, render_clip(SCENES, path_of(MOTIONS * 0))], ids=["blank", "still"])
def test_a_clip_that_shows_no_motion_is_not_found_where_it_was_asked_for(clip):
    found = estimate_camera(SCENES, clip)
    assert rotation_errors(found.camera, CAMERA).mean() > 0.1


def test_rewards_are_highest_for_what_was_asked_for():
    conditions = plane_conditions(torch.arange(6))
    given = {
        "cameras": [each.camera for each in conditions],
        "scene": [each.columns["scene"] for each in conditions],
    }
    prompts = [each.prompt for each in conditions]
    scenes, camera = Scenes.stacked(given["scene"]), torch.stack(given["cameras"])
    light = torch.tensor([LIGHT_LEVELS[prompt] for prompt in prompts]).view(-1, 1, 1, 1, 1)
    asked, still = render_clip(scenes, camera) * light, torch.stack([each.source for each in conditions]) * light
    judge = PlaneRewards()
    best, worse = (judge.camera(prompts, list(clips), **given) for clips in (asked, still))
    assert min(best) > 0.97
    assert all(low < high - 0.1 for low, high in zip(worse, best, strict=True))
    assert min(judge.quality(prompts, list(asked), **given)) > 0.999
    assert max(judge.quality(prompts, list(asked * 0), **given)) < 0.01
    in_the_wrong_light = judge.quality(prompts, list(asked * 0.6), **given)
    assert max(in_the_wrong_light) < 0.9
    assert max(judge.rotation_error(prompts, list(asked), **given)) < 2e-3


def test_prompts_are_words_and_unknown_ones_are_refused():
    assert encode(["by day", ""]).argmax(-1).tolist() == [[1, 3], [0, 0]]
    with pytest.raises(gw.UserError, match="The prompt is 'at noon'"):
        encode(["at noon"])


def test_pictures_are_drawn(tmp_path):
    from PIL import Image

    conditions = plane_conditions(torch.arange(2))
    clips = render_clip(SCENES.at(torch.arange(2)), CAMERA[:2])
    draw_gif(conditions, clips)(tmp_path / "clips.gif")
    draw_strip(conditions, clips)(tmp_path / "clips.png")
    with Image.open(tmp_path / "clips.gif") as movie:
        assert movie.n_frames == 8  # there and back
        assert movie.size == (2 * SIDE * 10, 2 * SIDE * 10)
    with Image.open(tmp_path / "clips.png") as strip:
        assert strip.width > strip.height
