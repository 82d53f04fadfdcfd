"""Image models from pipeline folders: Stable Diffusion 3, Flux.1 and Qwen-Image. Conditions are prompts only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import diffusers
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from groupwise.core.errors import UserError
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.models.base import Conditioning, FlowModel, guided
from groupwise.workloads.flow.models.pipeline_folder import (
    PipelineSchedule,
    TextEncoder,
    latent_image_size,
    load_pipeline_without_transformer,
    load_transformer,
    on_device,
    pipeline_class,
    text_length,
)
from groupwise.workloads.flow.models.trained_parts import select_trained_parameters
from groupwise.workloads.flow.task import Condition, ConditionSpec

PackedLatents = Float[Tensor, "rows tokens channels"]


class ImageModel(FlowModel):
    """What the image models share. Latents are [channels, height, width] outside of the transformers."""

    pipeline_name: ClassVar[str]
    transformer_name: ClassVar[str]
    packs_latents: ClassVar[bool] = True
    """Whether the pipeline makes 2 x 2 pixels of a latent one token before the transformer."""
    schedule_passes_sigmas: ClassVar[bool] = True
    """Whether the pipeline gives its scheduler the levels 1 ... 1/n to shift, or only their number."""

    def __init__(
        self,
        folder: Path,
        size: tuple[int, int],
        *,
        train: TrainedPartsConfig,
        device: torch.device,
        dtype: str = "bfloat16",
        negative_prompt: str = "",
        guidance_embedding: float = 3.5,
    ):
        """`guidance_embedding` is given to transformers that were distilled for a guidance scale."""
        self._folder, self.device, self._negative_prompt = folder, device, negative_prompt
        self.policy: Any = load_transformer(getattr(diffusers, self.transformer_name), folder, dtype, device)
        has_guidance = getattr(self.policy.config, "guidance_embeds", False)
        self._guidance = guidance_embedding if has_guidance else None
        self._reference = select_trained_parameters(self.policy, train)
        self.pipeline = load_pipeline_without_transformer(getattr(diffusers, self.pipeline_name), folder, dtype)
        latent_size = latent_image_size(*size, self.pipeline.vae_scale_factor)
        patch = self._patch_size()
        channels = self.policy.config.in_channels // (patch**2 if self.packs_latents else 1)
        self.condition_spec = ConditionSpec((channels, *latent_size), patch_size=(patch, patch))
        tokens = latent_size[0] // patch * (latent_size[1] // patch)
        self._schedule = PipelineSchedule(self.pipeline.scheduler, tokens=tokens, explicit=self.schedule_passes_sigmas)

    def _patch_size(self) -> int:
        """Pixels of a latent that make a token, along each side."""
        return 2

    @torch.no_grad()
    def encode(self, conditions: Sequence[Condition]) -> list[Conditioning]:
        prompts = [condition.prompt for condition in conditions]
        return self._texts.with_negative(prompts, self._encode_on_device, self._negative_prompt)

    @cached_property
    def _texts(self) -> TextEncoder:
        return TextEncoder(self.encoding_store, self._folder, self.pipeline)

    def _encode_on_device(self, prompts: list[str]) -> dict[str, Tensor]:
        encoders = [part for name, part in self.pipeline.components.items() if name.startswith("text_encoder")]
        with on_device(self.device, *encoders):
            return self._encode_prompts(prompts)

    def _encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        raise NotImplementedError

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self.transform(self.policy, latents, self._schedule.timesteps(sigma), conditioning).float()

    @staticmethod
    def transform(transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Conditioning) -> Tensor:
        """The transformer's velocity; timesteps are from 0 to 1000."""
        raise NotImplementedError

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        with on_device(self.device, self.pipeline.vae):
            images = self._decode(latents)
        return images.clamp(-1, 1).cpu().float()

    def _decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        scaled = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        images: Tensor = vae.decode(scaled.to(vae.dtype)).sample
        return images

    def reference(self) -> AbstractContextManager[None]:
        return self._reference()

    def noise_levels(self, steps: int) -> Sequence[float]:
        return self._schedule.noise_levels(steps)


class Sd3Model(ImageModel):
    """Stable Diffusion 3 and 3.5."""

    pipeline_name, transformer_name = "StableDiffusion3Pipeline", "SD3Transformer2DModel"
    packs_latents = schedule_passes_sigmas = False

    def _patch_size(self) -> int:
        return int(self.policy.config.patch_size)

    def _encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        text, _, pooled, _ = self.pipeline.encode_prompt(
            prompts,
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=text_length(self.pipeline),
        )
        return {"text": text, "pooled": pooled}

    @staticmethod
    def transform(transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Conditioning) -> Tensor:
        dtype = transformer.dtype
        (velocity,) = transformer(
            hidden_states=latents.to(dtype),
            timestep=timestep,
            encoder_hidden_states=conditioning["text"].to(dtype),
            pooled_projections=conditioning["pooled"].to(dtype),
            return_dict=False,
        )
        return cast(Tensor, velocity)


class FluxModel(ImageModel):
    """Flux.1: packed latents, and a guidance scale as an input of the transformer where it was distilled so (dev).

    The scale of classifier-free guidance, the pipeline's `true_cfg_scale`, is another one.
    """

    pipeline_name, transformer_name = "FluxPipeline", "FluxTransformer2DModel"
    guides_in_one_pass = False

    def _encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        text, pooled, _ = self.pipeline.encode_prompt(
            prompts, None, device=self.device, max_sequence_length=text_length(self.pipeline)
        )
        return {"text": text, "pooled": pooled}

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        if self._guidance is not None:
            conditioning = {**conditioning, "guidance": torch.full_like(sigma, self._guidance)}
        return super().velocity(latents, sigma, conditioning)

    @staticmethod
    def transform(transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Conditioning) -> Tensor:
        dtype, text = transformer.dtype, conditioning["text"]
        (velocity,) = transformer(
            hidden_states=pack(latents).to(dtype),
            timestep=timestep / 1000,
            guidance=conditioning.get("guidance"),
            pooled_projections=conditioning["pooled"].to(dtype),
            encoder_hidden_states=text.to(dtype),
            txt_ids=latents.new_zeros(text.shape[1], 3),
            img_ids=_positions(latents),
            return_dict=False,
        )
        return unpack(velocity, latents.shape)


class QwenImageModel(ImageModel):
    """Qwen-Image: packed latents; the guided velocity of a token has the norm of that for the prompt."""

    pipeline_name, transformer_name = "QwenImagePipeline", "QwenImageTransformer2DModel"
    guides_in_one_pass = False

    def __init__(self, folder: Path, size: tuple[int, int], **settings: Any):
        super().__init__(folder, size, **settings)
        if self._guidance is not None:
            raise UserError(
                f"{folder} is distilled for a guidance scale, which Qwen-Image has not. Take the released one."
            )

    def _encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """Padded to the longest prompt that the pipeline takes, so that rows can be stacked; passes cut it again."""
        length = text_length(self.pipeline)
        text, mask = self.pipeline.encode_prompt(prompts, device=self.device, max_sequence_length=length)
        mask = torch.ones(text.shape[:2], dtype=torch.int64, device=text.device) if mask is None else mask
        missing = length - text.shape[1]
        return {"text": pad(text, (0, 0, 0, missing)), "mask": pad(mask, (0, missing)).bool()}

    @staticmethod
    def transform(transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Conditioning) -> Tensor:
        dtype, mask = transformer.dtype, conditioning["mask"]
        longest = int(mask.sum(1).max())
        mask = mask[:, :longest]
        shape = (1, latents.shape[2] // 2, latents.shape[3] // 2)
        (velocity,) = transformer(
            hidden_states=pack(latents).to(dtype),
            timestep=timestep / 1000,
            guidance=None,
            encoder_hidden_states_mask=None if mask.all() else mask,
            encoder_hidden_states=conditioning["text"][:, :longest].to(dtype),
            img_shapes=[[shape]] * len(latents),
            return_dict=False,
        )
        return unpack(velocity, latents.shape)

    def guide(self, positive: Tensor, negative: Tensor, sigma: Tensor, scale: float) -> Tensor:
        combined = pack(guided(positive, negative, scale))
        norm = pack(positive).norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True)
        return unpack(combined * norm, positive.shape)

    def _decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(latents)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        frames: Tensor = vae.decode((latents[:, :, None] * std + mean).to(vae.dtype)).sample
        return frames[:, :, 0]


IMAGE_MODELS: dict[str, type[ImageModel]] = {
    model.pipeline_name: model for model in (Sd3Model, FluxModel, QwenImageModel)
}


def load_image_model(folder: Path, size: tuple[int, int], **settings: Any) -> ImageModel:
    """The model of a pipeline folder, by the class of its pipeline."""
    return IMAGE_MODELS[pipeline_class(folder, IMAGE_MODELS)](folder, size, **settings)


def pack(latents: Float[Tensor, "rows channels height width"]) -> PackedLatents:
    """2 x 2 pixels of all channels as one token."""
    rows, channels, height, width = latents.shape
    patches = latents.view(rows, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(rows, (height // 2) * (width // 2), channels * 4)


def unpack(packed: PackedLatents, shape: Sequence[int]) -> Float[Tensor, "rows channels height width"]:
    rows, channels, height, width = shape
    patches = packed.view(rows, height // 2, width // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(rows, channels, height, width)


def _positions(latents: Float[Tensor, "rows channels height width"]) -> Float[Tensor, "tokens 3"]:
    """0, row and column of each token."""
    height, width = latents.shape[2] // 2, latents.shape[3] // 2
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3).to(latents)
