"""The embedded image task: conditions, model, rewards, judge and images together."""

from __future__ import annotations

import torch

from groupwise.dist.devices import move_module
from groupwise.workloads.flow.task import Condition, FlowTask
from groupwise.workloads.flow.tasks.discs.charts import draw_images_sheet
from groupwise.workloads.flow.tasks.discs.config import WEIGHTS, DiscsConfig
from groupwise.workloads.flow.tasks.discs.judge import judge_discs, judge_obeyed
from groupwise.workloads.flow.tasks.discs.model import DiscsModel, load_discs
from groupwise.workloads.flow.tasks.discs.rewards import reward_functions
from groupwise.workloads.flow.tasks.discs.scene import all_prompts

_NUM_DRAWN = 18


def discs_task(config: DiscsConfig, device: torch.device) -> FlowTask:
    return FlowTask(
        model=DiscsModel(move_module(load_discs(config.folder), device), config.train),
        conditions=discs_conditions(all_prompts(held_out=False), config.images_per_prompt),
        held_out=discs_conditions(all_prompts(held_out=True), config.held_out_images_per_prompt),
        rewards=reward_functions(config.reward),
        eval_metrics={"obeyed (judge)": judge_obeyed, "discs (judge)": judge_discs},
        weights=WEIGHTS,
        images={"images.png": draw_images_sheet},
        num_images=_NUM_DRAWN,
    )


def discs_conditions(prompts: list[str], images_per_prompt: int) -> list[Condition]:
    """All prompts, again and again."""
    return [Condition(prompt, name=f"{prompt}, {number}") for number in range(images_per_prompt) for prompt in prompts]
