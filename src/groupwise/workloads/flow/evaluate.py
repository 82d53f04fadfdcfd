"""Held-out clips, generated without sampled steps from noise that is always the same, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from groupwise.core.placement import RolloutRows
from groupwise.workloads.flow.rewards import clip_rewards, weighted_sum

if TYPE_CHECKING:
    from groupwise.workloads.flow.workload import FlowWorkload


def evaluate_held_out(workload: FlowWorkload) -> Mapping[str, float]:
    """Means of the rewards and evaluation metrics; with the task's weights their weighted sum, too."""
    task = workload.task
    if not task.held_out:
        return {}
    clips = generate_held_out(workload, torch.arange(len(task.held_out)))
    terms = clip_rewards({**task.rewards, **task.eval_metrics}, task.held_out, clips)
    metrics = {f"held-out {name}": values.nanmean().item() for name, values in terms.per_rollout.items()}
    if not task.weights:
        return metrics
    return {"held-out reward": weighted_sum(terms, task.weights).nanmean().item(), **metrics}


@torch.no_grad()
def generate_held_out(workload: FlowWorkload, indices: Tensor) -> Tensor:
    """Clips of these held-out conditions under the current policy, `eval_rows` at a time."""
    config = workload.config
    steps = config.eval_steps or config.sampling.num_inference_steps
    sampling = replace(config.sampling, shared_noise=True)  # or the noise would depend on it
    denoiser = replace(workload.denoiser(steps), config=sampling, window=range(steps, steps))
    rows_per_pass = workload.row_limits["eval_rows"]
    rows = RolloutRows(config.eval_seed, 0, rows_per_pass, indices, torch.zeros_like(indices), indices)
    clips = []
    for part in rows.passes():
        velocity = workload.velocity(workload.held_out_conditioning, part.condition)
        clips.append(workload.decode(denoiser.denoise_to_window(denoiser.initial_noise(part), velocity)))
    return torch.cat(clips)
