"""Wan with camera layers, from a pipeline folder: a clip along another camera path, from a source clip."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.models.base import NEGATIVE_PREFIX, Conditioning
from groupwise.workloads.flow.models.camera_layers import add_camera_layers, camera_velocity
from groupwise.workloads.flow.models.checkpoints import load_camera_layers
from groupwise.workloads.flow.models.pipeline_folder import (
    check_pipeline,
    latent_image_size,
    load_pipeline_without_transformer,
    load_transformer,
    on_device,
)
from groupwise.workloads.flow.models.trained_parts import select_trained_parameters
from groupwise.workloads.flow.task import Condition, ConditionSpec


@dataclass(frozen=True)
class ClipSize:
    """Size of the generated clips, in pixels."""

    frames: int
    height: int
    width: int


class WanCameraModel:
    """A FlowModel."""

    def __init__(
        self,
        folder: Path,
        size: ClipSize,
        *,
        train: TrainedPartsConfig,
        device: torch.device,
        dtype: str = "bfloat16",
        negative_prompt: str = "",
        camera_layers: Path | None = None,
    ):
        check_pipeline(folder, "WanPipeline")
        self.device, self.size, self._negative_prompt = device, size, negative_prompt
        self.policy: WanTransformer3DModel = load_transformer(WanTransformer3DModel, folder, dtype, device)
        add_camera_layers(self.policy)
        if camera_layers is not None:
            load_camera_layers(self.policy, camera_layers)
        self._reference = select_trained_parameters(self.policy, train)
        self.pipeline = load_pipeline_without_transformer(WanPipeline, folder, dtype)
        self._latent_scale = _latent_scale(self.pipeline.vae)
        self.condition_spec = ConditionSpec(
            latent_shape=(self.pipeline.vae.config.z_dim, *_latent_size(size, self.pipeline)),
            patch_size=tuple(self.policy.config.patch_size),
            source_frames=size.frames,
            source_size=(size.height, size.width),
            has_camera=True,
        )

    @torch.no_grad()
    def encode(self, conditions: Sequence[Condition]) -> list[Conditioning]:
        """Prompts by the text encoder, source clips by the VAE; both are on the device only for this call."""
        prompts = [condition.prompt for condition in conditions]
        with on_device(self.device, self.pipeline.text_encoder):
            positive, negative = self.pipeline.encode_prompt(
                prompts, [self._negative_prompt] * len(prompts), device=self.device, max_sequence_length=226
            )
        clips = torch.stack([c.source_clip[:, : self.size.frames] for c in conditions if c.source_clip is not None])
        with on_device(self.device, self.pipeline.vae):
            latents = self.pipeline.vae.encode(clips.to(self.device, self.pipeline.vae.dtype)).latent_dist.mode()
        mean, std = (scale.to(latents) for scale in self._latent_scale)
        sources = ((latents - mean) / std).cpu()
        return [
            {
                "text": positive[index].cpu(),
                f"{NEGATIVE_PREFIX}text": negative[index].cpu(),
                "source": sources[index],
                "camera": condition.camera.float(),
            }
            for index, condition in enumerate(conditions)
            if condition.camera is not None
        ]

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return camera_velocity(self.policy, latents, 1000 * sigma, **conditioning).float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        mean, std = (scale.to(latents) for scale in self._latent_scale)
        with on_device(self.device, self.pipeline.vae):
            clips = self.pipeline.vae.decode((latents * std + mean).to(self.pipeline.vae.dtype)).sample
        return clips.clamp(-1, 1).cpu().float()

    def reference(self) -> AbstractContextManager[None]:
        return self._reference()


def _latent_scale(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and std of the VAE's latents, by channel."""
    mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)


def _latent_size(size: ClipSize, pipeline: WanPipeline) -> tuple[int, int, int]:
    """Frames, height and width of the latents."""
    time = pipeline.vae_scale_factor_temporal
    if (size.frames - 1) % time:
        lower = (size.frames - 1) // time * time + 1
        raise UserError(
            f"workload.frames is {size.frames}: the VAE joins {time} frames after the first, so it must be 1 + a"
            f" multiple of {time}. Take {lower} or {lower + time}."
        )
    height, width = latent_image_size(size.height, size.width, pipeline.vae_scale_factor_spatial)
    return (size.frames - 1) // time + 1, height, width
