"""What training on the embedded task can reach: the base model follows and draws well when asked for a shorter way."""

from dataclasses import replace

import pytest
import torch

from groupwise.recipes import load_recipe
from groupwise.workloads.flow.data.cameras import motion_to_pose
from groupwise.workloads.flow.evaluate import generate_clips
from groupwise.workloads.flow.rewards import clip_rewards
from groupwise.workloads.flow.sampling.encodings import ConditioningCache
from groupwise.workloads.flow.tasks.sprites.scene import draw_motions
from groupwise.workloads.flow.tasks.sprites.task import sprites_conditions

CLIPS = 96


@pytest.mark.slow
def test_asked_for_two_thirds_of_the_way_the_base_model_goes_all_of_it():
    """So no layer that draws has to change: how poses are read is enough."""
    workload = replace(load_recipe("flow").workload, scenes=8, held_out_scenes=1).build(torch.device("cpu"))
    numbers = 5_000_000 + torch.arange(CLIPS)
    conditions, motions = sprites_conditions(numbers), draw_motions(7, numbers)
    terms = {}
    for scale in (1.0, 0.7):
        cameras = motion_to_pose(scale * motions)
        asked = [replace(each, camera=camera) for each, camera in zip(conditions, cameras, strict=True)]
        cache = ConditioningCache(workload.model, asked, max_cached=CLIPS, encode_rows=16)
        clips = generate_clips(workload, cache, torch.arange(CLIPS))
        rewards = clip_rewards(workload.task.rewards, conditions, clips).per_rollout
        terms[scale] = {name: values.mean().item() for name, values in rewards.items()}
    upper = {"camera": 0.855, "quality": 0.878}
    assert terms[0.7]["camera"] > (terms[1.0]["camera"] + upper["camera"]) / 2
    assert terms[1.0]["quality"] < terms[0.7]["quality"] < upper["quality"]
