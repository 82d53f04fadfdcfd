"""Held-out clips, generated without sampled steps from noise that is always the same, and their metrics."""

from __future__ import annotations

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


def evaluate_clips(workload: FlowWorkload, indices: Tensor) -> dict[str, Tensor]:
    """Rewards and evaluation metrics of held-out clips; with the task's weights their weighted sum, too.

    `eval_rows` clips are held at a time.
    """
    task, parts = workload.task, []
    for part in indices.split(workload.row_limits["eval_rows"]):
        conditions = [task.held_out[index] for index in part.tolist()]
        clips = generate_held_out(workload, part)
        terms = clip_rewards({**task.rewards, **task.eval_metrics}, conditions, clips)
        total = {"reward": weighted_sum(terms, task.weights)} if task.weights else {}
        parts.append({**total, **terms.per_rollout})
    return {f"held-out {name}": torch.cat([part[name] for part in parts]) for name in parts[0]}


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
