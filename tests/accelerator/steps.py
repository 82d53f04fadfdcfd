"""Training steps of the embedded recipes in small shapes, on any device; and what the emulated one counts in a step.

    python -m accelerator.steps [RECIPE ...]

prints kernels, host synchronizations, bytes and the measured memory of the second step of each.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import groupwise as gw
from groupwise.recipes import load_recipe
from groupwise.training.loop import train_step
from groupwise.training.setup import Setup, set_up
from groupwise.workloads.chat.config import ChatEvalConfig

DOORS = Path(__file__).parents[2] / "examples" / "doors.py"
RECIPES = ("doors", "chat", "flow", "controller")
SHAPES = {"doors": (16, 8, 64), "chat": (8, 4, 16), "flow": (4, 4, 8), "controller": (16, 8, 64)}
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


if __name__ == "__main__":
    from accelerator import emulated

    torch.set_num_threads(1)
    counted = emulated.register()
    print("| recipe | host synchronizations | kernels | bytes to the device | to the host | peak memory |")
    print("|---|---|---|---|---|---|")
    for recipe in sys.argv[1:] or RECIPES:
        built = set_up(small_recipe(recipe, device=emulated.NAME))
        train_step(built)
        counted.reset_counters()
        train_step(built)
        by_name = counted.counters()
        order = ("host_syncs", "kernels", "bytes_to_device", "bytes_to_host", "peak_bytes")
        print(f"| {recipe} | {' | '.join(f'{by_name[name]:,}' for name in order)} |")
        print(f"  {recipe}: {counted.syncs_by_name()}", file=sys.stderr)
