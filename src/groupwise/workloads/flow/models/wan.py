"""Wan with camera layers, from a pipeline folder: a source clip and a camera path into a new clip."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.workloads.flow.config import TrainConfig
from groupwise.workloads.flow.models.base import NEGATIVE_PREFIX, Conditioning
from groupwise.workloads.flow.models.camera_layers import add_camera_layers, camera_velocity, camera_weights
from groupwise.workloads.flow.models.pipeline_folder import (
    check_pipeline,
    load_pipeline_without_transformer,
    load_transformer,
    on_device,
)
from groupwise.workloads.flow.models.trained_parts import select_trained_parameters
from groupwise.workloads.flow.task import Condition, ConditionSpec


@dataclass(frozen=True)
class ClipSize:
    """Of what is generated, in pixels."""

    frames: int
    height: int
    width: int


class WanCameraModel:
    """Follows the FlowModel protocol."""

    def __init__(
        self,
        folder: Path,
        size: ClipSize,
        *,
        train: TrainConfig,
        device: torch.device,
        dtype: str = "bfloat16",
        negative_prompt: str = "",
        camera_layers: Path | None = None,
    ):
        check_pipeline(folder, "WanPipeline")
        self.device, self.size, self._negative = device, size, negative_prompt
        self.policy: WanTransformer3DModel = load_transformer(WanTransformer3DModel, folder, dtype, device)
        add_camera_layers(self.policy)
        if camera_layers is not None:
            load_camera_layers(self.policy, camera_layers)
        self._first = select_trained_parameters(self.policy, train)
        self.pipeline = load_pipeline_without_transformer(WanPipeline, folder, dtype)
        self._scale = _latent_scale(self.pipeline.vae)
        self.asked = ConditionSpec(
            latent=(self.pipeline.vae.config.z_dim, *_latent_size(size, self.pipeline)),
            patch=tuple(self.policy.config.patch_size),
            source_frames=size.frames,
            source_size=(size.height, size.width),
            has_camera=True,
        )

    @torch.no_grad()
    def encode(self, conditions: Sequence[Condition]) -> list[Conditioning]:
        """Prompts through the text encoder, source clips through the VAE; each is on the device only for that long."""
        prompts = [condition.prompt for condition in conditions]
        with on_device(self.device, self.pipeline.text_encoder):
            given, without = self.pipeline.encode_prompt(
                prompts, [self._negative] * len(prompts), device=self.device, max_sequence_length=226
            )
        clips = torch.stack([c.source[:, : self.size.frames] for c in conditions if c.source is not None])
        with on_device(self.device, self.pipeline.vae):
            latents = self.pipeline.vae.encode(clips.to(self.device, self.pipeline.vae.dtype)).latent_dist.mode()
        mean, std = (each.to(latents) for each in self._scale)
        sources = ((latents - mean) / std).cpu()
        return [
            {
                "text": given[nth].cpu(),
                f"{NEGATIVE_PREFIX}text": without[nth].cpu(),
                "source": sources[nth],
                "camera": condition.camera.float(),
            }
            for nth, condition in enumerate(conditions)
            if condition.camera is not None
        ]

    def velocity(self, latents: Tensor, sigma: Tensor, encoding: Conditioning) -> Tensor:
        return camera_velocity(self.policy, latents, 1000 * sigma, **encoding).float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        mean, std = (each.to(latents) for each in self._scale)
        with on_device(self.device, self.pipeline.vae):
            clips = self.pipeline.vae.decode((latents * std + mean).to(self.pipeline.vae.dtype)).sample
        return clips.clamp(-1, 1).cpu().float()

    def reference(self) -> AbstractContextManager[None]:
        return self._first()


def load_camera_layers(transformer: WanTransformer3DModel, path: Path) -> None:
    """Camera layers that were trained before, by the names that `camera_weights` gives them."""
    wanted, saved = camera_weights(transformer), load_file(path)
    strangers = sorted(set(wanted) ^ set(saved))
    if strangers:
        raise UserError(
            f"{path} does not hold the camera layers of this transformer: '{strangers[0]}' is missing on one side. Save"
            " them by the names of groupwise.workloads.flow.models.camera_layers.camera_weights."
        )
    with torch.no_grad():
        for name, weight in wanted.items():
            weight.copy_(saved[name])


def _latent_scale(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and std of the VAE's latents, by channel."""
    config = vae.config
    return torch.tensor(config.latents_mean).view(1, -1, 1, 1, 1), torch.tensor(config.latents_std).view(1, -1, 1, 1, 1)


def _latent_size(size: ClipSize, pipeline: WanPipeline) -> tuple[int, int, int]:
    """Frames, height and width after the VAE; sizes that it does not divide are refused with the nearest that fit."""
    time, space = pipeline.vae_scale_factor_temporal, pipeline.vae_scale_factor_spatial
    if (size.frames - 1) % time:
        lower = (size.frames - 1) // time * time + 1
        raise UserError(
            f"workload.frames is {size.frames}: the VAE joins {time} frames after the first, so it must be 1 + a"
            f" multiple of {time}. Take {lower} or {lower + time}."
        )
    for name in ("height", "width"):
        value = getattr(size, name)
        if value % space:
            lower = value // space * space
            fitting = " or ".join(str(each) for each in (lower, lower + space) if each)
            raise UserError(f"workload.{name} is {value}: the VAE needs a multiple of {space}. Take {fitting}.")
    return (size.frames - 1) // time + 1, size.height // space, size.width // space
