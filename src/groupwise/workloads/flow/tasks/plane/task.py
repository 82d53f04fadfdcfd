"""The embedded task: conditions, model, rewards and images together."""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

from groupwise.workloads.flow.cameras import motion_to_pose
from groupwise.workloads.flow.task import Condition, FlowTask
from groupwise.workloads.flow.tasks.plane.charts import draw_gif, draw_grid
from groupwise.workloads.flow.tasks.plane.config import WEIGHTS, PlaneConfig
from groupwise.workloads.flow.tasks.plane.model import PlaneModel, load_plane
from groupwise.workloads.flow.tasks.plane.rewards import PlaneRewards
from groupwise.workloads.flow.tasks.plane.scene import LIGHT_LEVELS, draw_motions, draw_scenes, render_clip

_SEED = 7
_FIRST_HELD_OUT = 1_000_000


def plane_task(config: PlaneConfig, device: torch.device) -> FlowTask:
    """The same on every rank: each scene and path is a function of its number."""
    rewards = PlaneRewards()
    return FlowTask(
        model=PlaneModel(load_plane(config.folder).to(device)),
        conditions=plane_conditions(torch.arange(config.scenes)),
        held_out=plane_conditions(_FIRST_HELD_OUT + torch.arange(config.held_out_scenes)),
        rewards={"camera": rewards.camera, "quality": rewards.quality},
        eval_metrics={"rotation error (rad)": rewards.rotation_error, "translation error": rewards.translation_error},
        weights=WEIGHTS,
        images={"clips.png": draw_grid, "clips.gif": draw_gif},
    )


def plane_conditions(numbers: Int64[Tensor, " conditions"]) -> list[Condition]:
    """A source clip of a scene, and the camera path and the light in which to show it."""
    scenes, cameras = draw_scenes(_SEED, numbers), motion_to_pose(draw_motions(_SEED, numbers))
    sources = render_clip(scenes, motion_to_pose(draw_motions(_SEED, numbers, of_source=True)))
    prompts = list(LIGHT_LEVELS)
    return [
        Condition(
            prompt=prompts[number % len(prompts)],
            source_clip=sources[index],
            camera=cameras[index],
            name=f"plane {number}",
            reward_columns={"scene": scenes.select(torch.tensor([index]))},
        )
        for index, number in enumerate(numbers.tolist())
    ]
