"""The embedded task: conditions, the shipped model, rewards in closed form, and a strip of clips to look at."""

from __future__ import annotations

import torch

from groupwise.workloads.flow.task import Condition, FlowTask
from groupwise.workloads.flow.tasks.plane.charts import draw_gif, draw_strip
from groupwise.workloads.flow.tasks.plane.config import WEIGHTS, PlaneConfig
from groupwise.workloads.flow.tasks.plane.model import ASSET, PlaneModel, load_plane
from groupwise.workloads.flow.tasks.plane.rewards import PlaneRewards
from groupwise.workloads.flow.tasks.plane.scene import LIGHT_LEVELS, draw_motions, draw_scenes, path_of, render_clip

_SEED = 7
_HELD_OUT = 1_000_000  # numbers of held-out scenes begin here


def plane_task(config: PlaneConfig, device: torch.device) -> FlowTask:
    """The same on every rank: every scene and path is a function of its number."""
    judge = PlaneRewards()
    transformer = load_plane(config.model or ASSET).to(device)
    return FlowTask(
        model=PlaneModel(transformer),
        conditions=plane_conditions(torch.arange(config.scenes)),
        held_out=plane_conditions(_HELD_OUT + torch.arange(config.held_out_scenes)),
        rewards={"camera": judge.camera, "quality": judge.quality},
        measured={"rotation error (rad)": judge.rotation_error, "translation error": judge.translation_error},
        weights=WEIGHTS,
        pictures={"clips.png": draw_strip, "clips.gif": draw_gif},
    )


def plane_conditions(numbers: torch.Tensor) -> list[Condition]:
    """A scene, the clip of it that is known, and the path and the light in which it is to be seen."""
    scenes, paths = draw_scenes(_SEED, numbers), path_of(draw_motions(_SEED, numbers))
    sources = render_clip(scenes, path_of(draw_motions(_SEED, numbers, own=True)))
    lights = list(LIGHT_LEVELS)
    return [
        Condition(
            prompt=lights[number % len(lights)],
            source=sources[nth],
            camera=paths[nth],
            name=f"plane {number}",
            columns={"scene": scenes.at(torch.tensor([nth]))},
        )
        for nth, number in enumerate(numbers.tolist())
    ]
