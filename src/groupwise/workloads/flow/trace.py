"""A flow model's steps and update followed with fake tensors: the transformer's real passes, no memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from groupwise.memory.stages import StepSpec
from groupwise.memory.trace import fake_tensors, replace_with_fake, trace_peak, trace_update
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.memory import FlowMemory
from groupwise.workloads.flow.models.base import NEGATIVE_PREFIX, GuidedVelocity
from groupwise.workloads.flow.models.camera_layers import POSE_DIM, add_camera_layers, camera_velocity
from groupwise.workloads.flow.models.trained_parts import select_trained_parameters
from groupwise.workloads.flow.sampling.denoiser import Denoiser
from groupwise.workloads.flow.sampling.schedule import SamplingConfig
from groupwise.workloads.flow.sampling.steppers import transition_logprob


def fake_transformer(
    content: Mapping[str, Any], train: TrainedPartsConfig, *, checkpointing: bool = False, fake: bool = True
) -> WanTransformer3DModel:
    """A Wan transformer with camera layers by its config alone: without memory, or with random weights."""
    with fake_tensors() if fake else nullcontext() as mode:
        transformer = WanTransformer3DModel.from_config(dict(content)).eval()
    add_camera_layers(transformer)
    select_trained_parameters(transformer, train)
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    if mode is not None:
        replace_with_fake(transformer, mode)
    return transformer


@dataclass(frozen=True)
class Followed:
    """A pass of rollout, a pass of update, and what is held besides the transformer."""

    rollout: Callable[[], object]
    one_pass: Callable[[], Tensor]
    held: tuple[Tensor, ...]


def stages_of(transformer: WanTransformer3DModel, memory: FlowMemory, job: StepSpec, *, fake: bool = True) -> Followed:
    """Every step of the window drawn, and scored, as the workload does; rows are as many as go together.

    Rows of a group may share the window's first step. A rollout goes on with each row's own, to the last.
    """
    rows, shape, window = job.shape.rows_per_pass, memory.latent, range(1, memory.trained_steps + 1)
    guidance = 5.0 if memory.guided else 1.0
    sampling = SamplingConfig(
        num_inference_steps=memory.trained_steps + 2, guidance_scale=guidance, shared_noise=memory.branch
    )
    velocity = _velocity(transformer, memory, rows, guidance)
    path = torch.zeros(rows, memory.trained_steps + 1, *shape)
    group = torch.arange(rows) % memory.starts(job)
    denoiser = Denoiser(sampling, shape, window, torch.device("cpu"))

    def logp(nth: int) -> Tensor:
        steps, shared = torch.full((rows,), window[nth]), denoiser.shared_start(group, nth)
        return transition_logprob(path[:, nth + 1], denoiser.transition(path[:, nth], velocity, steps, shared=shared))

    def scored() -> Tensor:
        return torch.stack([logp(nth) for nth in range(memory.trained_steps)], dim=1)

    def rollout() -> object:
        return scored(), denoiser.denoise_from_window(path[:, -1], velocity)

    return Followed(rollout, lambda: scored().exp().mean(), _held(transformer, memory, job, fake=fake))


def _velocity(transformer: WanTransformer3DModel, memory: FlowMemory, rows: int, guidance: float) -> GuidedVelocity:
    text = torch.zeros(rows, memory.text_tokens, memory.model.text_width)
    encoding = {
        "text": text,
        f"{NEGATIVE_PREFIX}text": text,
        "source": torch.zeros(rows, *memory.latent),
        "camera": torch.zeros(rows, memory.latent[1], POSE_DIM),
    }
    model = SimpleNamespace(
        velocity=lambda latents, sigma, told: camera_velocity(transformer, latents, 1000 * sigma, **told).float()
    )
    return GuidedVelocity(model, encoding, guidance)


def _held(transformer: WanTransformer3DModel, memory: FlowMemory, job: StepSpec, *, fake: bool) -> tuple[Tensor, ...]:
    """The first weights, where all or some of the model's own are trained, and the rollouts' latents."""
    trained = [weight for weight in transformer.parameters() if weight.requires_grad and memory.lora_rank is None]
    with fake_tensors() if fake else nullcontext():
        latents = torch.empty(memory.trajectory_bytes(job), dtype=torch.uint8)
        return (latents, *(torch.empty_like(weight) for weight in trained))


def followed_rollout(transformer: WanTransformer3DModel, found: Followed) -> int:
    """Highest bytes of a rollout's steps, with AdamW's moments; decoding the clips is not followed."""
    trained = [weight for weight in transformer.parameters() if weight.requires_grad]
    with fake_tensors():
        moments = [torch.empty_like(weight) for weight in trained for _ in range(2)]
    return trace_peak(found.rollout, *transformer.parameters(), *transformer.buffers(), *found.held, *moments)


def traced_flow(
    content: Mapping[str, Any], train: TrainedPartsConfig, memory: FlowMemory, job: StepSpec
) -> dict[str, int]:
    """Highest bytes of a rollout's steps and of the update's last pass, of a transformer in float32."""
    transformer = fake_transformer(content, train, checkpointing=memory.checkpointing)
    found = stages_of(transformer, memory, job)
    return {
        "rollout": followed_rollout(transformer, found),
        "update": trace_update(transformer, found.one_pass, job, more=found.held),
    }
