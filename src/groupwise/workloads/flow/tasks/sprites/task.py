"""The embedded task: conditions, model, rewards and images together."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.dist.devices import move_module
from groupwise.workloads.flow.data.cameras import motion_to_pose
from groupwise.workloads.flow.task import Condition, FlowTask
from groupwise.workloads.flow.tasks.sprites.charts import draw_clips_gif, draw_clips_sheet
from groupwise.workloads.flow.tasks.sprites.comparison import compare_models
from groupwise.workloads.flow.tasks.sprites.config import WEIGHTS, SpritesConfig
from groupwise.workloads.flow.tasks.sprites.latents import source_pictures
from groupwise.workloads.flow.tasks.sprites.metrics import against_truth, floor_correlation, psnr
from groupwise.workloads.flow.tasks.sprites.model import SpritesModel, load_sprites
from groupwise.workloads.flow.tasks.sprites.rewards import SpritesRewards, expected_positions
from groupwise.workloads.flow.tasks.sprites.scene import LIGHT_LEVELS, draw_motions, draw_scenes, light_levels

_SEED = 7
_FIRST_HELD_OUT, FIRST_FINAL = 1_000_000, 6_000_000


def sprites_task(config: SpritesConfig, device: torch.device) -> FlowTask:
    """The same on all ranks: each scene and path is a function of its number."""
    rewards = SpritesRewards()
    return FlowTask(
        model=SpritesModel(move_module(load_sprites(config.folder), device), config.train),
        conditions=sprites_conditions(torch.arange(config.scenes)),
        held_out=sprites_conditions(_FIRST_HELD_OUT + torch.arange(config.held_out_scenes)),
        rewards={"camera": rewards.term("camera"), "quality": rewards.term("quality")},
        eval_metrics={
            "sprite error (px)": rewards.term("error_px"),
            "floor": against_truth(floor_correlation),
            "PSNR (dB)": against_truth(psnr),
        },
        weights=WEIGHTS,
        images={"clips.png": draw_clips_sheet, "clips.gif": draw_clips_gif},
        num_images=6,
        final_report=lambda workload: compare_models(
            workload, sprites_conditions(FIRST_FINAL + torch.arange(config.final_scenes))
        ),
    )


def sprites_motions(numbers: Int64[Tensor, " conditions"]) -> Float[Tensor, "conditions frames 6"]:
    """The requested paths of these conditions as motions from the first pose."""
    return draw_motions(_SEED, numbers)


def sprites_conditions(numbers: Int64[Tensor, " conditions"]) -> list[Condition]:
    """A picture of a scene, and the camera path and the light in which to show it."""
    scenes, cameras = draw_scenes(_SEED, numbers), motion_to_pose(sprites_motions(numbers))
    lights = list(LIGHT_LEVELS)
    prompts = [lights[number % len(lights)] for number in numbers.tolist()]
    sources, expected = source_pictures(scenes), expected_positions(scenes, cameras, light_levels(prompts))
    return [
        Condition(
            prompt=prompts[index],
            source_clip=sources[index],
            camera=cameras[index],
            name=f"sprites {number}",
            reward_columns={
                "scene": scenes[index],
                "centroid": expected.centroid[index],
                "area": expected.area[index],
            },
        )
        for index, number in enumerate(numbers.tolist())
    ]
