"""Stable Diffusion 3's transformer from a pipeline folder: a prompt into a picture."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.workloads.flow.config import TrainConfig
from groupwise.workloads.flow.models.base import NEGATIVE_PREFIX, Conditioning
from groupwise.workloads.flow.models.pipeline_folder import (
    check_pipeline,
    load_pipeline_without_transformer,
    load_transformer,
    on_device,
)
from groupwise.workloads.flow.models.trained_parts import select_trained_parameters
from groupwise.workloads.flow.task import Condition, ConditionSpec


class Sd3Model:
    """Follows the FlowModel protocol; conditions are prompts alone."""

    def __init__(
        self,
        folder: Path,
        size: tuple[int, int],
        *,
        train: TrainConfig,
        device: torch.device,
        dtype: str = "bfloat16",
        negative_prompt: str = "",
    ):
        check_pipeline(folder, "StableDiffusion3Pipeline")
        self.device, self._negative = device, negative_prompt
        self.policy: SD3Transformer2DModel = load_transformer(SD3Transformer2DModel, folder, dtype, device)
        self._first = select_trained_parameters(self.policy, train)
        self.pipeline = load_pipeline_without_transformer(StableDiffusion3Pipeline, folder, dtype)
        space = self.pipeline.vae_scale_factor
        for name, value in zip(("height", "width"), size, strict=True):
            if value % space:
                lower = value // space * space
                fitting = " or ".join(str(each) for each in (lower, lower + space) if each)
                raise UserError(f"workload.{name} is {value}: the VAE needs a multiple of {space}. Take {fitting}.")
        patch = self.policy.config.patch_size
        channels = self.policy.config.in_channels
        self.asked = ConditionSpec(latent=(channels, size[0] // space, size[1] // space), patch=(patch, patch))

    @torch.no_grad()
    def encode(self, conditions: Sequence[Condition]) -> list[Conditioning]:
        prompts, pipe = [condition.prompt for condition in conditions], self.pipeline
        with on_device(self.device, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3):
            encoded = pipe.encode_prompt(
                prompts, None, None, device=self.device, negative_prompt=[self._negative] * len(prompts)
            )
        names = ("text", f"{NEGATIVE_PREFIX}text", "pooled", f"{NEGATIVE_PREFIX}pooled")
        return [
            {name: column[nth].cpu() for name, column in zip(names, encoded, strict=True)}
            for nth in range(len(prompts))
        ]

    def velocity(self, latents: Tensor, sigma: Tensor, encoding: Conditioning) -> Tensor:
        dtype = self.policy.dtype
        (found,) = self.policy(
            hidden_states=latents.to(dtype),
            timestep=1000 * sigma,
            encoder_hidden_states=encoding["text"].to(dtype),
            pooled_projections=encoding["pooled"].to(dtype),
            return_dict=False,
        )
        return found.float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        with on_device(self.device, vae):
            scaled = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
            pictures = vae.decode(scaled.to(vae.dtype)).sample
        return pictures.clamp(-1, 1).cpu().float()

    def reference(self) -> AbstractContextManager[None]:
        return self._first()
