"""Peak memory of a flow model's rollout and update, traced with fake tensors through the real transformer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from groupwise.memory.stages import StepSpec
from groupwise.memory.trace import TracedStep, fake_tensors, replace_with_fake, trace_step
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.memory import FlowMemory
from groupwise.workloads.flow.models.base import NEGATIVE_PREFIX, GuidedVelocity
from groupwise.workloads.flow.models.camera_layers import POSE_DIM, add_camera_layers, camera_velocity
from groupwise.workloads.flow.models.trained_parts import select_trained_parameters
from groupwise.workloads.flow.sampling.denoiser import Denoiser
from groupwise.workloads.flow.sampling.schedule import SamplingConfig
from groupwise.workloads.flow.sampling.steppers import transition_logprob


def trace_flow(
    content: Mapping[str, Any], train: TrainedPartsConfig, memory: FlowMemory, spec: StepSpec
) -> dict[str, int]:
    """Peak bytes of a rollout's denoising steps and of the update's last pass, of a transformer in float32."""
    transformer = fake_transformer(content, train, checkpointing=memory.checkpointing)
    return trace_step(flow_step(transformer, memory, spec), spec)


def fake_transformer(
    content: Mapping[str, Any], train: TrainedPartsConfig, *, checkpointing: bool = False, fake: bool = True
) -> WanTransformer3DModel:
    """A Wan transformer with camera layers from its config alone: on fake tensors, or with random weights."""
    with fake_tensors() if fake else nullcontext() as mode:
        transformer = WanTransformer3DModel.from_config(dict(content)).eval()
    add_camera_layers(transformer)
    select_trained_parameters(transformer, train)
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    if mode is not None:
        replace_with_fake(transformer, mode)
    return transformer


def flow_step(
    transformer: WanTransformer3DModel, memory: FlowMemory, spec: StepSpec, *, fake: bool = True
) -> TracedStep:
    """All steps of the window, sampled and scored as the workload does, for as many rows as a pass has.

    Rows of a group may share the window's first step. A rollout continues with each row alone, to the last step.
    Decoding the clips is not traced.
    """
    rows, window = spec.shape.largest_pass, range(1, memory.trained_steps + 1)
    guidance = 5.0 if memory.guided else 1.0
    sampling = SamplingConfig(
        num_inference_steps=memory.trained_steps + 2, guidance_scale=guidance, shared_noise=memory.shared_noise
    )
    velocity = _velocity(transformer, memory, rows, guidance)
    latents = torch.zeros(rows, memory.trained_steps + 1, *memory.latent)
    group = torch.arange(rows) % memory.first_step_rows(spec)
    denoiser = Denoiser(sampling, memory.latent, window, torch.device("cpu"))

    def logp(index: int) -> Tensor:
        steps, shared = torch.full((rows,), window[index]), denoiser.shared_start(group, index)
        transition = denoiser.transition(latents[:, index], velocity, steps, shared=shared)
        return transition_logprob(latents[:, index + 1], transition)

    def score() -> Tensor:
        return torch.stack([logp(index) for index in range(memory.trained_steps)], dim=1)

    def rollout() -> object:
        return score(), denoiser.denoise_from_window(latents[:, -1], velocity)

    held = _held(transformer, memory, spec, fake=fake)
    return TracedStep(transformer, lambda: score().exp().mean(), rollout, held=held)


def _velocity(transformer: WanTransformer3DModel, memory: FlowMemory, rows: int, guidance: float) -> GuidedVelocity:
    text = torch.zeros(rows, memory.text_tokens, memory.model.text_width)
    channels, frames, *size = memory.latent
    source_frames = frames if memory.source_frames is None else memory.source_frames
    conditioning = {
        "text": text,
        f"{NEGATIVE_PREFIX}text": text,
        "source": torch.zeros(rows, channels, source_frames, *size),
        "camera": torch.zeros(rows, frames, POSE_DIM),
    }
    model = SimpleNamespace(
        velocity=lambda latents, sigma, inputs: camera_velocity(transformer, latents, 1000 * sigma, **inputs).float()
    )
    return GuidedVelocity(model, conditioning, guidance)


def _held(transformer: WanTransformer3DModel, memory: FlowMemory, spec: StepSpec, *, fake: bool) -> tuple[Tensor, ...]:
    """The initial weights, where all or some of the model's own are trained, and the rollouts' latents."""
    trained = [weight for weight in transformer.parameters() if weight.requires_grad and memory.lora_rank is None]
    with fake_tensors() if fake else nullcontext():
        latents = torch.empty(memory.trajectory_bytes(spec), dtype=torch.uint8)
        return (latents, *(torch.empty_like(weight) for weight in trained))
