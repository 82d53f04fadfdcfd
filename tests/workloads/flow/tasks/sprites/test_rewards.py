"""The rewards know a right clip from a wrong one, by hand; what they do not look at, the metrics see."""

import math

import pytest
import torch
from torch.testing import assert_close

from groupwise.workloads.flow.data.cameras import motion_to_pose
from groupwise.workloads.flow.tasks.sprites.latents import true_clips
from groupwise.workloads.flow.tasks.sprites.metrics import against_truth, floor_correlation, psnr
from groupwise.workloads.flow.tasks.sprites.pixels import SpritePositions, halve, locate_sprites, sprite_shares
from groupwise.workloads.flow.tasks.sprites.rewards import SpritesRewards, expected_positions, find_camera, judge_clips
from groupwise.workloads.flow.tasks.sprites.scene import draw_motions, draw_scenes, light_levels
from groupwise.workloads.flow.tasks.sprites.task import sprites_conditions

NUMBERS = torch.arange(24)
SCENES, MOTIONS = draw_scenes(5, NUMBERS), draw_motions(5, NUMBERS)
PATHS, LIGHT = motion_to_pose(MOTIONS), light_levels(["by day", "at dusk", "by night"] * 8)
TRUTH, EXPECTED = true_clips(SCENES, PATHS, LIGHT), expected_positions(SCENES, PATHS, LIGHT)


def judged(clips):
    return {name: values.mean().item() for name, values in judge_clips(clips, SCENES, LIGHT, EXPECTED).items()}


def test_sprites_are_found_where_they_are():
    centers = torch.tensor([[[0.0, 0.0], [-0.5, 0.25], [0.5, 0.0]]])
    clip = true_clips(centers, motion_to_pose(torch.zeros(1, 8, 6)), torch.ones(1))
    found = locate_sprites(sprite_shares(halve(clip), torch.ones(1)))
    assert_close(found.centroid[:, :, 0], centers, rtol=0, atol=0.02)
    # pi 0.3^2, 0.528^2 and 3 sqrt(3) 0.186^2, in pixels of 1/12 x 1/12
    areas = torch.tensor([math.pi * 0.09, 0.528**2, 27**0.5 * 0.186**2]) * 144
    assert_close(found.area[0, :, 0], areas, rtol=0.12, atol=0)


def test_a_right_clip_scores_best_and_one_that_stays_or_goes_back_less():
    right, halfway, still, back = (
        judged(true_clips(SCENES, motion_to_pose(gain * MOTIONS), LIGHT)) for gain in (1.0, 0.5, 0.0, -0.5)
    )
    assert right["camera"] == pytest.approx(1, abs=1e-5)
    assert right["error_px"] == pytest.approx(0, abs=1e-4)
    assert right["camera"] > halfway["camera"] + 0.3 > still["camera"] + 0.4 > back["camera"] + 0.4
    # quality does not ask where the camera went
    assert min(way["quality"] for way in (right, halfway, still, back)) > 0.9


def test_a_clip_that_is_off_by_half_the_tolerance_by_hand():
    off = MOTIONS[:8] * 0
    expected = expected_positions(SCENES[:8], motion_to_pose(off), LIGHT[:8])
    off[..., 3] = 0.05
    terms = judge_clips(true_clips(SCENES[:8], motion_to_pose(off), LIGHT[:8]), SCENES[:8], LIGHT[:8], expected)
    assert_close(terms["camera"], torch.full((8,), math.exp(-0.5)), rtol=0.05, atol=0)
    assert_close(terms["error_px"], torch.full((8,), 1.2), rtol=0.08, atol=0)  # 0.05 of 24 pixels


def test_a_missing_sprite_scores_nothing_and_lowers_quality():
    without_disc = TRUTH.clone()
    shares = torch.nn.functional.interpolate(
        sprite_shares(halve(TRUTH), LIGHT)[:, 0].flatten(0, 1)[:, None], scale_factor=2
    )
    is_disc = shares.unflatten(0, (24, 8)).transpose(1, 2).expand_as(TRUTH) > 0.02
    without_disc[is_disc] = 0.0
    terms = judged(without_disc)
    assert terms["camera"] == pytest.approx(2 / 3, abs=0.02)
    assert terms["quality"] < judged(TRUTH)["quality"] - 0.2
    gray = judged(torch.zeros_like(TRUTH))
    assert gray["camera"] == 0
    assert gray["quality"] < 0.05


def test_the_camera_of_exact_centroids_is_found_exactly():
    motions = MOTIONS[:, -1:] * 0.5
    rolls, moves = motions[..., 2], motions[..., 3:]
    away = (SCENES - moves[..., :2]) / (1 - moves[..., 2:])
    cos, sin = rolls.cos()[:, 0, None], rolls.sin()[:, 0, None]
    seen = torch.stack([cos * away[..., 0] + sin * away[..., 1], cos * away[..., 1] - sin * away[..., 0]], dim=-1)
    positions = SpritePositions(seen[:, :, None].clamp(-0.71, 0.71), torch.full((24, 3, 1), 30.0))
    inside = (seen.abs() < 0.7).all(-1).all(-1)
    assert inside.sum() > 5
    assert_close(find_camera(positions, SCENES)[inside], motion_to_pose(motions)[inside], rtol=0, atol=1e-4)


def test_the_metrics_see_what_the_rewards_do_not():
    """Sprites of the requested clip over the floor of a camera that stays: a full reward, a low floor."""
    still = true_clips(SCENES, motion_to_pose(0 * MOTIONS), LIGHT)
    shares = sprite_shares(halve(TRUTH), LIGHT).amax(1).unsqueeze(1)
    of_sprites = torch.nn.functional.interpolate(shares.flatten(0, 1), scale_factor=2).view(24, 1, 8, 48, 48) > 0.02
    bare = true_clips(SCENES + 9, motion_to_pose(0 * MOTIONS), LIGHT)  # the floor alone: all sprites far away
    hacked = torch.where(of_sprites, TRUTH, bare)
    assert judged(hacked)["camera"] > 0.9
    assert floor_correlation(TRUTH, TRUTH, LIGHT).min() > 0.999
    assert floor_correlation(hacked, TRUTH, LIGHT).mean() < 0.55
    assert floor_correlation(still, TRUTH, LIGHT).mean() < 0.55
    assert psnr(hacked, TRUTH, LIGHT).mean() < 26


def test_psnr_by_hand():
    clip = torch.zeros(1, 3, 8, 48, 48)
    assert_close(psnr(clip + 0.2, clip, LIGHT[:1]), torch.tensor([20.0]))  # 0.1 of the range
    assert_close(psnr(clip, clip, LIGHT[:1]), torch.tensor([60.0]))  # the most that is reported


def test_functions_of_many_conditions_agree_with_one_at_a_time():
    conditions = sprites_conditions(torch.arange(18))
    names = ("scene", "centroid", "area")
    columns = {name: [condition.reward_columns[name] for condition in conditions] for name in names}
    columns["cameras"] = [condition.camera for condition in conditions]
    prompts, light = [condition.prompt for condition in conditions], light_levels([c.prompt for c in conditions])
    clips = list(true_clips(torch.stack(columns["scene"]), motion_to_pose(draw_motions(9, torch.arange(18))), light))
    rewards = SpritesRewards()
    for term in (rewards.term("camera"), rewards.term("quality"), against_truth(psnr)):
        together = term(prompts, clips, **columns)
        alone = [
            term(
                prompts[row : row + 1],
                clips[row : row + 1],
                **{name: column[row : row + 1] for name, column in columns.items()},
            )[0]
            for row in (0, 17)
        ]
        assert [together[0], together[17]] == pytest.approx(alone, abs=1e-5)
