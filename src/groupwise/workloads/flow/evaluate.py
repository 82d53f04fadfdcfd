"""Held-out clips, generated without sampled steps from noise that is always the same, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from groupwise.core.placement import RolloutRows
from groupwise.workloads.flow.models.base import FlowModel, GuidedVelocity
from groupwise.workloads.flow.rewards import clip_rewards, weighted_sum
from groupwise.workloads.flow.sampling.encodings import ConditioningCache

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


def generate_held_out(workload: FlowWorkload, indices: Tensor) -> Tensor:
    """Clips of these held-out conditions under the current policy."""
    return generate_clips(workload, workload.held_out_conditioning, indices)


@torch.no_grad()
def generate_clips(
    workload: FlowWorkload, conditioning: ConditioningCache, indices: Tensor, *, model: FlowModel | None = None
) -> Tensor:
    """Clips of these conditions, `eval_rows` at a time, by the workload's model or another with the same latents."""
    config = workload.config
    steps = config.eval_steps or config.sampling.num_inference_steps
    sampling = replace(config.sampling, shared_noise=True)  # or the noise would depend on it
    denoiser = replace(workload.denoiser(steps), config=sampling, window=range(steps, steps))
    rows_per_pass = workload.row_limits["eval_rows"]
    rows = RolloutRows(config.eval_seed, 0, rows_per_pass, indices, torch.zeros_like(indices), indices)
    clips = []
    for part in rows.passes():
        inputs = conditioning.of(part.condition, workload.device)
        velocity = GuidedVelocity(model or workload.model, inputs, config.sampling.guidance_scale)
        clips.append(workload.decode(denoiser.denoise_to_window(denoiser.initial_noise(part), velocity)))
    return torch.cat(clips)
