"""What limits training on the embedded task: how well the base model draws when it happens to follow the label."""

from dataclasses import replace

import pytest
import torch

from groupwise.recipes import load_recipe
from groupwise.workloads.flow.evaluate import generate_held_out
from groupwise.workloads.flow.tasks.sprites.pixels import SpritePositions, halve, locate_sprites, sprite_shares
from groupwise.workloads.flow.tasks.sprites.rewards import find_camera, judge_clips
from groupwise.workloads.flow.tasks.sprites.scene import light_levels


@pytest.mark.slow
def test_clips_of_the_base_model_that_follow_are_not_drawn_as_well_as_half_way_to_the_upper_bound():
    workload = replace(load_recipe("flow").workload, scenes=8, held_out_scenes=192).build(torch.device("cpu"))
    held_out = workload.task.held_out
    clips, light = generate_held_out(workload, torch.arange(192)), light_levels([each.prompt for each in held_out])
    scene, centroid, area = (
        torch.stack([each.reward_columns[name] for each in held_out]) for name in ("scene", "centroid", "area")
    )
    terms = judge_clips(clips, scene, light, SpritePositions(centroid, area))
    found = find_camera(locate_sprites(sprite_shares(halve(clips), light)), scene)
    went, asked = found[..., 3:8:4], torch.stack([each.camera for each in held_out])[..., 3:8:4]
    gain = (went * asked).sum((1, 2)) / asked.square().sum((1, 2))
    follows, stays = (gain > 0.8) & (gain < 1.2), (gain > -0.3) & (gain < 0.3)
    assert follows.sum() > 30
    assert stays.sum() > 30
    half_way = (0.445 + 0.856) / 2  # between base model and upper bound
    assert 0.55 < terms["camera"][follows].mean() < half_way + 0.02
    assert terms["quality"][follows].mean() < terms["quality"][stays].mean() - 0.02
