"""Stable Diffusion 3, from a pipeline folder: an image from a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor

from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.models.base import NEGATIVE_PREFIX, Conditioning
from groupwise.workloads.flow.models.pipeline_folder import (
    check_pipeline,
    latent_image_size,
    load_pipeline_without_transformer,
    load_transformer,
    on_device,
)
from groupwise.workloads.flow.models.trained_parts import select_trained_parameters
from groupwise.workloads.flow.task import Condition, ConditionSpec


class Sd3Model:
    """A FlowModel whose conditions are prompts only."""

    def __init__(
        self,
        folder: Path,
        size: tuple[int, int],
        *,
        train: TrainedPartsConfig,
        device: torch.device,
        dtype: str = "bfloat16",
        negative_prompt: str = "",
    ):
        check_pipeline(folder, "StableDiffusion3Pipeline")
        self.device, self._negative_prompt = device, negative_prompt
        self.policy: SD3Transformer2DModel = load_transformer(SD3Transformer2DModel, folder, dtype, device)
        self._reference = select_trained_parameters(self.policy, train)
        self.pipeline = load_pipeline_without_transformer(StableDiffusion3Pipeline, folder, dtype)
        latent_size = latent_image_size(*size, self.pipeline.vae_scale_factor)
        patch = self.policy.config.patch_size
        self.condition_spec = ConditionSpec(
            latent_shape=(self.policy.config.in_channels, *latent_size), patch_size=(patch, patch)
        )

    @torch.no_grad()
    def encode(self, conditions: Sequence[Condition]) -> list[Conditioning]:
        prompts, pipe = [condition.prompt for condition in conditions], self.pipeline
        with on_device(self.device, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
            encoded = pipe.encode_prompt(
                prompts, None, None, device=self.device, negative_prompt=[self._negative_prompt] * len(prompts)
            )
        names = ("text", f"{NEGATIVE_PREFIX}text", "pooled", f"{NEGATIVE_PREFIX}pooled")
        return [
            {name: column[index].cpu() for name, column in zip(names, encoded, strict=True)}
            for index in range(len(prompts))
        ]

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        dtype = self.policy.dtype
        (velocity,) = self.policy(
            hidden_states=latents.to(dtype),
            timestep=1000 * sigma,
            encoder_hidden_states=conditioning["text"].to(dtype),
            pooled_projections=conditioning["pooled"].to(dtype),
            return_dict=False,
        )
        return velocity.float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        with on_device(self.device, vae):
            scaled = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
            images = vae.decode(scaled.to(vae.dtype)).sample
        return images.clamp(-1, 1).cpu().float()

    def reference(self) -> AbstractContextManager[None]:
        return self._reference()
