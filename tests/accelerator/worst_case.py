"""The step of an embedded recipe that its memory plan assumes: every row as long and as costly as it can be.

    python -m accelerator.worst_case RECIPE small | recipe

Prints one JSON object: planned and measured peak bytes of each stage on the emulated device. It is a program of its own
so that nothing else is in the device's memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from accelerator import emulated
from accelerator.steps import small_recipe
from groupwise.core.types import RewardTerms
from groupwise.recipes import load_recipe
from groupwise.training import loop
from groupwise.training.config import Config
from groupwise.training.setup import Setup, known_memory, set_up, step_spec
from groupwise.workloads.controller.policy.decide import replay_option
from groupwise.workloads.controller.trace import _distinct_paths

PLANNED = ("chat", "flow", "flow-image", "controller")
"""Recipes with a memory plan."""
STAGES = {"rollout": "generate_rollouts", "reward": "compute_rewards", "update": "update"}


def recipe(name: str, kind: str) -> Config:
    """In its own shape or in a small one, on the emulated device."""
    small = small_recipe(name, device=emulated.NAME)
    if kind == "small":
        return small
    own = load_recipe(name)
    shape = {field: getattr(own, field) for field in ("conditions_per_step", "group_size", "rows_per_pass")}
    workload = replace(small.workload, mosaics=400) if name == "controller" else small.workload
    return replace(small, **shape, workload=workload)


def lengthen_chat(setup: Setup) -> None:
    """All prompts have the longest length, no completion stops, and members get different rewards."""
    workload: Any = setup.workload
    components = workload.components
    longest = setup.config.workload.memory_model().prompt_tokens
    ids = [(prompt * longest)[:longest] for prompt in components.training.ids]
    sampling = replace(components.sampling, stop_token_ids=())
    workload.components = replace(components, training=replace(components.training, ids=ids), sampling=sampling)
    workload.sampling = sampling
    workload.rewards = lambda rollouts: RewardTerms({"reward": torch.arange(len(rollouts)) % 2})


def distinct_paths(setup: Setup) -> None:
    """All rows take the finest tier, no two rows of a question the same path, and no question is known."""
    workload: Any = setup.workload
    workload.task.answers.precomputed = None
    workload.controller.hidden_states._by_image.clear()

    def decide(conditions: Any, rows: torch.Tensor, _selector: object) -> Any:
        choices = _distinct_paths(workload.options, rows)
        return type(workload.controller).decide(workload.controller, conditions, rows, replay_option(choices))

    workload.controller.decide = decide


WORST = {"chat": lengthen_chat, "controller": distinct_paths}


def measure(config: Config, make_worst: Callable[[Setup], None] | None) -> dict[str, dict[str, int]]:
    """Bytes of each stage of the second step, which finds AdamW's moments in memory."""
    device, peaks = emulated.register(), dict[str, int]()

    def counted(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            device.reset_counters()
            result = function(*arguments)
            peaks[stage] = device.counters()["peak_bytes"]
            return result

        return call

    for stage, name in STAGES.items():
        setattr(loop, name, counted(stage, getattr(loop, name)))
    setup = set_up(config)
    if make_worst is not None:
        make_worst(setup)
    for _ in range(2):
        loop.train_step(setup)
    model = known_memory(config.workload)
    assert model is not None
    planned = model.predict(step_spec(config, setup.comm, setup.workload, setup.state))
    measured = {"rollout": max(peaks["rollout"], peaks["reward"]), "update": peaks["update"]}
    totals = {stage: sum(parts.values()) for stage, parts in planned.to_dict().items()}
    return {"planned": totals, "measured": measured, "parts": planned.to_dict()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = sys.argv[1]
    sys.stdout.write(json.dumps(measure(recipe(chosen, sys.argv[2]), WORST.get(chosen))) + "\n")
