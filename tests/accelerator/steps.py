"""Training steps of the embedded recipes in small shapes, on any device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

import groupwise as gw
from groupwise.recipes import load_recipe
from groupwise.training.loop import train_step
from groupwise.training.setup import Setup, set_up
from groupwise.workloads.chat.config import ChatEvalConfig

DOORS = Path(__file__).parents[2] / "examples" / "doors.py"
RECIPES = ("doors", "chat", "flow", "flow-image", "controller")
SHAPES = {
    "doors": (16, 8, 16),
    "chat": (8, 4, 16),
    "flow": (4, 4, 8),
    "flow-image": (8, 4, 16),
    "controller": (16, 8, 64),
}
"""Conditions per step, group size, rows per pass."""


def small_recipe(name: str, *, steps: int = 2, device: str | None = None) -> gw.Config:
    """A recipe as it is but for its shape and the size of its evaluation."""
    config = load_recipe(str(DOORS) if name == "doors" else name)
    conditions, members, rows = SHAPES[name]
    config = replace(config, steps=steps, conditions_per_step=conditions, group_size=members, rows_per_pass=rows)
    config = replace(config, run=replace(config.run, device=device, checkpoint_every=1))
    if name == "chat":
        evaluation = ChatEvalConfig(num_prompts=4, samples_per_prompt=2, report_samples_per_prompt=2)
        return replace(config, workload=replace(config.workload, eval=evaluation))
    if name == "flow":
        return replace(config, workload=replace(config.workload, scenes=64, held_out_scenes=4, final_scenes=4))
    if name == "flow-image":
        return replace(config, workload=replace(config.workload, images_per_prompt=2, held_out_images_per_prompt=1))
    if name == "controller":  # no profile of this machine, which takes long
        few = {"mosaics": 24, "held_out_mosaics": 1, "estimator": "proportional"}
        return replace(config, workload=replace(config.workload, **few))
    return config


@dataclass(frozen=True)
class Trained:
    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]


def train_steps(config: gw.Config) -> Trained:
    setup = set_up(config)
    metrics = [dict(train_step(setup).metrics) for _ in range(config.steps)]
    return Trained(metrics, weights_of(setup))


def weights_of(setup: Setup) -> dict[str, Tensor]:
    return {name: weight.detach().cpu() for name, weight in setup.state.policy.named_parameters()}
