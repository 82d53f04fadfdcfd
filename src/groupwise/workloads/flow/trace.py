"""Peak memory of a flow model's rollout and update, traced with fake tensors through the real transformer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import diffusers
import torch
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from groupwise.memory.stages import StepSpec
from groupwise.memory.trace import TracedStep, fake_tensors, replace_with_fake, trace_step
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.memory import FlowMemory, WanArchitecture
from groupwise.workloads.flow.models.base import Conditioning, GuidedVelocity, guided
from groupwise.workloads.flow.models.camera_layers import POSE_DIM, add_camera_layers, camera_velocity
from groupwise.workloads.flow.models.image import IMAGE_MODELS
from groupwise.workloads.flow.models.trained_parts import select_trained_parameters
from groupwise.workloads.flow.sampling.denoiser import Denoiser
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, noise_levels
from groupwise.workloads.flow.sampling.steppers import transition_logprob

CLIP_TOKENS = 257
"""Of the image that Wan 2.1 makes clips from."""


def trace_flow(
    content: Mapping[str, Any], train: TrainedPartsConfig, memory: FlowMemory, spec: StepSpec
) -> dict[str, int]:
    """Peak bytes of a rollout's denoising steps and of the update's last pass."""
    dtype = torch.float32 if memory.dtype_bytes == 4 else torch.bfloat16
    camera = isinstance(memory.model, WanArchitecture) and bool(memory.model.pose_dim)
    transformer = fake_transformer(content, train, camera=camera, checkpointing=memory.checkpointing, dtype=dtype)
    return trace_step(flow_step(transformer, memory, spec), spec)


def fake_transformer(
    content: Mapping[str, Any],
    train: TrainedPartsConfig,
    *,
    camera: bool = True,
    checkpointing: bool = False,
    fake: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A transformer from its config alone, with camera layers or without: on fake tensors, or with random weights."""
    with fake_tensors() if fake else nullcontext() as mode:
        transformer = getattr(diffusers, content["_class_name"]).from_config(dict(content)).eval()
        _cast(transformer, dtype)
    if camera:
        add_camera_layers(transformer)
    select_trained_parameters(transformer, train)
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    if mode is not None:
        replace_with_fake(transformer, mode)
    return transformer


def _cast(transformer: ModelMixin, dtype: torch.dtype) -> None:
    """As from_pretrained does it: some parts stay in float32."""
    kept = tuple(transformer._keep_in_fp32_modules or ())
    for path, module in transformer.named_modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if not any(part in f"{path}.{name}".split(".") for part in kept):
                module._parameters[name] = nn.Parameter(weight.data.to(dtype), requires_grad=weight.requires_grad)


def flow_step(transformer: Any, memory: FlowMemory, spec: StepSpec, *, fake: bool = True) -> TracedStep:
    """All steps of the window, sampled and scored as the workload does, for as many rows as a pass has.

    Rows of a group may share the window's first step. A rollout continues with each row alone, to the last step.
    Decoding the clips is not traced: it holds as much as is planned for it.
    """
    rows, window = spec.shape.largest_pass, range(1, memory.trained_steps + 1)
    guidance = 5.0 if memory.guided else 1.0
    sampling = SamplingConfig(
        num_inference_steps=memory.trained_steps + 2, guidance_scale=guidance, shared_noise=memory.shared_noise
    )
    velocity = _velocity(transformer, memory, rows, guidance)
    latents = torch.zeros(rows, memory.trained_steps + 1, *memory.latent)
    group = torch.arange(rows) % memory.first_step_rows(spec)
    denoiser = Denoiser(sampling, noise_levels(sampling), memory.latent, torch.device("cpu"), window)

    def logp(index: int) -> Tensor:
        steps, shared = torch.full((rows,), window[index]), denoiser.shared_start(group, index)
        transition = denoiser.transition(latents[:, index], velocity, steps, shared=shared)
        return transition_logprob(latents[:, index + 1], transition)

    def update_pass() -> Tensor:
        for index in range(memory.trained_steps - 1):
            logp(index).exp().mean().backward()
        return logp(memory.trained_steps - 1).exp().mean()

    def rollout() -> object:
        sampled = [logp(index) for index in range(memory.trained_steps)]
        final = denoiser.denoise_from_window(latents[:, -1], velocity)
        return sampled, final, torch.empty(memory.decoded_bytes(spec), dtype=torch.uint8)

    held = _held(transformer, memory, spec, fake=fake)
    with fake_tensors() if fake else nullcontext():
        copied = torch.empty(memory.trajectory_bytes(rows), dtype=torch.uint8)  # the rows of the pass
    return TracedStep(transformer, update_pass, rollout, held=held, held_in_update=(copied,))


def _velocity(transformer: Any, memory: FlowMemory, rows: int, guidance: float) -> GuidedVelocity:
    video = isinstance(memory.model, WanArchitecture)
    model = SimpleNamespace(
        velocity=_wan_velocity(transformer, memory.model) if video else _image_velocity(transformer),
        guide=lambda positive, negative, _sigma, scale: guided(positive, negative, scale),
        guides_in_one_pass=memory.guided_together,
    )
    return GuidedVelocity(model, _conditioning(transformer, memory, rows), guidance)


def _conditioning(transformer: Any, memory: FlowMemory, rows: int) -> Conditioning:
    """Of zeros, for all that the model takes."""
    sizes, text = transformer.config, (rows, memory.text_tokens)
    if not isinstance(memory.model, WanArchitecture):
        conditioning = {"text": torch.zeros(*text, sizes.joint_attention_dim), "mask": torch.ones(text).bool()}
        if hasattr(sizes, "pooled_projection_dim"):
            conditioning["pooled"] = torch.zeros(rows, sizes.pooled_projection_dim)
        return conditioning | ({"guidance": torch.zeros(rows)} if getattr(sizes, "guidance_embeds", False) else {})
    conditioning = {"text": torch.zeros(*text, memory.model.text_width)}
    if memory.model.pose_dim:
        channels, frames, *size = memory.latent
        source_frames = frames if memory.model.source_frames is None else memory.model.source_frames
        conditioning["source"] = torch.zeros(rows, channels, source_frames, *size)
        conditioning["camera"] = torch.zeros(rows, frames, POSE_DIM)
    return conditioning


def _image_velocity(transformer: Any) -> Callable[[Tensor, Tensor, Conditioning], Tensor]:
    (model,) = [model for model in IMAGE_MODELS.values() if model.transformer_name == type(transformer).__name__]
    return lambda latents, sigma, inputs: model.transform(transformer, latents, 1000 * sigma, inputs).float()


def _wan_velocity(transformer: Any, sizes: Any) -> Callable[[Tensor, Tensor, Conditioning], Tensor]:
    def from_camera(latents: Tensor, sigma: Tensor, inputs: Conditioning) -> Tensor:
        return camera_velocity(transformer, latents, 1000 * sigma, **inputs).float()

    def plain(latents: Tensor, sigma: Tensor, inputs: Conditioning) -> Tensor:
        rows, dtype = len(latents), transformer.dtype
        image_latents = latents.new_zeros(rows, sizes.channels - latents.shape[1], *latents.shape[2:])
        image = latents.new_zeros(rows, CLIP_TOKENS, sizes.image_width, dtype=dtype) if sizes.image_width else None
        (velocity,) = transformer(
            hidden_states=torch.cat([latents, image_latents], dim=1).to(dtype),
            timestep=1000 * sigma,
            encoder_hidden_states=inputs["text"].to(dtype),
            encoder_hidden_states_image=image,
            return_dict=False,
        )
        return cast(Tensor, velocity.float())

    return from_camera if sizes.pose_dim else plain


def _held(transformer: Any, memory: FlowMemory, spec: StepSpec, *, fake: bool) -> tuple[Tensor, ...]:
    """The initial weights, where all or some of the model's own are trained, and the rollouts' latents."""
    trained = [weight for weight in transformer.parameters() if weight.requires_grad and memory.part != "lora"]
    with fake_tensors() if fake else nullcontext():
        latents = torch.empty(memory.trajectory_bytes(spec.shape.rollouts_per_rank), dtype=torch.uint8)
        return (latents, *(torch.empty_like(weight) for weight in trained))
