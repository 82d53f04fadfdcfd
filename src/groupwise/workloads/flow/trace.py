"""A flow model's update followed with fake tensors: the transformer's real passes, no memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from groupwise.plan.parts import Job
from groupwise.plan.trace import fake_tensors, make_fake, of_update, traced_update
from groupwise.plan.video import VideoMemory
from groupwise.workloads.flow.models.adapters import choose_trained
from groupwise.workloads.flow.models.base import GuidedVelocity
from groupwise.workloads.flow.models.camera_layers import POSE, add_camera_layers, camera_velocity
from groupwise.workloads.flow.sampling import Denoiser
from groupwise.workloads.flow.schedule import SamplingConfig
from groupwise.workloads.flow.steppers import log_probability
from groupwise.workloads.flow.training_parts import TrainConfig


def transformer_like(
    content: Mapping[str, Any], train: TrainConfig, *, checkpointing: bool = False, fake: bool = True
) -> WanTransformer3DModel:
    """A Wan transformer with camera layers by its config alone: without memory, or with random weights."""
    with fake_tensors() if fake else nullcontext() as mode:
        transformer = WanTransformer3DModel.from_config(dict(content)).eval()
    add_camera_layers(transformer)
    choose_trained(transformer, train)
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    if mode is not None:
        make_fake(transformer, mode)
    return transformer


def scored_pass(
    transformer: WanTransformer3DModel, memory: VideoMemory, rows: int, groups: int | None = None
) -> Callable[[], Tensor]:
    """The loss of one pass: every step of the window scored, as the workload does.

    The rows are of so many groups, whose members may share the window's first step; None where each has its own.
    """
    guidance = 5.0 if memory.guided else 1.0
    sampling = SamplingConfig(steps=memory.trained_steps + 2, guidance=guidance, branch=memory.branch)
    shape, words = memory.latent, memory.text_tokens
    text = torch.zeros(rows, words, memory.model.text_width)
    encoding = {
        "text": text,
        "unprompted_text": text,
        "source": torch.zeros(rows, *shape),
        "camera": torch.zeros(rows, shape[1], POSE),
    }
    path = torch.zeros(rows, memory.trained_steps + 1, *shape)
    model = SimpleNamespace(
        velocity=lambda latents, sigma, told: camera_velocity(transformer, latents, 1000 * sigma, **told).float()
    )
    velocity = GuidedVelocity(model, encoding, sampling.guidance)
    alike = torch.arange(rows) % (groups or rows)

    def one_pass() -> Tensor:
        denoiser = Denoiser(sampling, shape, range(0), torch.device("cpu"))
        found = []
        for nth in range(memory.trained_steps):
            steps, same = torch.full((rows,), nth), denoiser.alike(alike, nth)
            transition = denoiser.transition(path[:, nth], velocity, steps, alike=same)
            found.append(log_probability(path[:, nth + 1], transition))
        return torch.stack(found, dim=1).exp().mean()

    return one_pass


def traced_flow(content: Mapping[str, Any], train: TrainConfig, memory: VideoMemory, job: Job) -> dict[str, int]:
    """Highest bytes of the update, of a transformer in float32."""
    transformer = transformer_like(content, train, checkpointing=memory.checkpointing)
    one = scored_pass(transformer, memory, job.shape.rows_per_pass, memory.starts(job))
    return {"update": traced_update(transformer, one, **of_update(job))}
