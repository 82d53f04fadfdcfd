"""The camera is estimated from the frames alone, and rewards compare it with the requested one."""

import pytest
import torch

from groupwise.workloads.flow.cameras import motion_to_pose, rotation_errors, translation_errors
from groupwise.workloads.flow.tasks.plane.rewards import PlaneRewards, estimate_camera
from groupwise.workloads.flow.tasks.plane.scene import Scenes, brightness, draw_motions, draw_scenes, render_clip
from groupwise.workloads.flow.tasks.plane.task import plane_conditions

NUMBERS = torch.arange(12)
SCENES, MOTIONS = draw_scenes(3, NUMBERS), draw_motions(3, NUMBERS)
CAMERA = motion_to_pose(MOTIONS)
CLIPS = render_clip(SCENES, CAMERA)


def test_the_camera_is_estimated_to_a_thousandth_and_explains_everything():
    estimate = estimate_camera(SCENES, CLIPS)
    assert rotation_errors(estimate.camera, CAMERA).max() < 2e-3
    assert translation_errors(estimate.camera, CAMERA).max() < 2e-3
    assert estimate.explained.min() > 0.9999


def test_noise_costs_quality_and_little_accuracy():
    noise = 0.1 * torch.randn(CLIPS.shape, generator=torch.Generator().manual_seed(0))
    estimate = estimate_camera(SCENES, CLIPS + noise)
    assert rotation_errors(estimate.camera, CAMERA).mean() < 0.04
    assert 0.8 < estimate.explained.mean() < 0.99


@pytest.mark.parametrize("clip", [CLIPS * 0, render_clip(SCENES, motion_to_pose(MOTIONS * 0))], ids=["blank", "still"])
def test_a_clip_without_motion_is_not_credited_with_the_requested_path(clip):
    estimate = estimate_camera(SCENES, clip)
    assert rotation_errors(estimate.camera, CAMERA).mean() > 0.1


def test_rewards_are_highest_for_the_requested_clip():
    conditions = plane_conditions(torch.arange(6))
    columns = {
        "cameras": [condition.camera for condition in conditions],
        "scene": [condition.reward_columns["scene"] for condition in conditions],
    }
    prompts = [condition.prompt for condition in conditions]
    scenes, camera, light = Scenes.concatenate(columns["scene"]), torch.stack(columns["cameras"]), brightness(prompts)
    requested = render_clip(scenes, camera) * light
    still = torch.stack([condition.source_clip for condition in conditions]) * light
    rewards = PlaneRewards()
    best, worse = (rewards.camera(prompts, list(clips), **columns) for clips in (requested, still))
    assert min(best) > 0.97
    assert all(low < high - 0.1 for low, high in zip(worse, best, strict=True))
    assert min(rewards.quality(prompts, list(requested), **columns)) > 0.999
    assert max(rewards.quality(prompts, list(requested * 0), **columns)) < 0.01
    in_the_wrong_light = rewards.quality(prompts, list(requested * 0.6), **columns)
    assert max(in_the_wrong_light) < 0.9
    assert max(rewards.rotation_error(prompts, list(requested), **columns)) < 2e-3
