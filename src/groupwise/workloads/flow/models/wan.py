"""Wan 2.1 and 2.2, from a pipeline folder: clips from prompts, from an image, or along another camera path.

Wan 2.2 has two transformers: one for the noise levels from `boundary_ratio` on, one for those below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.utils import numpy_to_pil
from jaxtyping import Float
from torch import Tensor, nn

from groupwise.core.errors import UserError
from groupwise.dist.sharding import call_block
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.models.base import Conditioning, FlowModel, guided
from groupwise.workloads.flow.models.camera_layers import add_camera_layers, camera_velocity
from groupwise.workloads.flow.models.checkpoints import load_camera_layers
from groupwise.workloads.flow.models.pipeline_folder import (
    PipelineSchedule,
    TextEncoder,
    encoder_hash,
    first_row,
    latent_image_size,
    load_pipeline_without_transformer,
    load_transformer,
    on_device,
    pipeline_class,
    read_index,
    text_length,
)
from groupwise.workloads.flow.models.trained_parts import select_trained_parameters
from groupwise.workloads.flow.sampling.encoding_store import CachedEncoder
from groupwise.workloads.flow.task import Condition, ConditionSpec

HIGH_NOISE, LOW_NOISE = "transformer", "transformer_2"
"""A pipeline's names of its transformers; most have only the first."""


@dataclass(frozen=True)
class ClipSize:
    """Size of the generated clips, in pixels."""

    frames: int
    height: int
    width: int


class TwoTransformers(nn.Module):
    """Those of Wan 2.2, under their names in the pipeline. A ModuleDict, FSDP would not shard."""

    def __init__(self, transformers: Mapping[str, WanTransformer3DModel]):
        super().__init__()
        for name, transformer in transformers.items():
            self.add_module(name, transformer)


class WanModel(FlowModel):
    """Text to video, and image to video where the pipeline is one: then the source clip is the image."""

    guides_in_one_pass = False
    known: tuple[str, ...] = ("WanPipeline", "WanImageToVideoPipeline")

    def __init__(
        self,
        folder: Path,
        size: ClipSize,
        *,
        train: TrainedPartsConfig,
        device: torch.device,
        dtype: str = "bfloat16",
        negative_prompt: str = "",
        low_noise_guidance_scale: float | None = None,
    ):
        saved_class, names = pipeline_class(folder, self.known), transformer_names(folder)
        self._folder, self.device, self.size, self._negative_prompt = folder, device, size, negative_prompt
        self._low_noise_guidance_scale = low_noise_guidance_scale
        self._transformers: dict[str, WanTransformer3DModel] = {
            name: load_transformer(WanTransformer3DModel, folder, dtype, device, name) for name in names
        }
        for transformer in self._transformers.values():
            self._prepare(transformer)
        references = [select_trained_parameters(each, train) for each in self._transformers.values()]
        self._references = references
        self.policy: nn.Module = self._only or TwoTransformers(self._transformers)
        self.pipeline = load_pipeline_without_transformer(getattr(diffusers, saved_class), folder, dtype, names)
        self._boundary = _boundary(self.pipeline, names, folder)
        self._from_image = saved_class == "WanImageToVideoPipeline"
        if self._from_image and self.pipeline.config.expand_timesteps:
            raise UserError(
                f"{folder} makes clips from an image with a timestep per token (expand_timesteps), which is not"
                " supported. Take an A14B or a Wan 2.1 pipeline, or a WanPipeline of the same model."
            )
        self._schedule = PipelineSchedule(self.pipeline.scheduler)
        self._latent_scale = _latent_scale(self.pipeline.vae)
        self.condition_spec = self._condition_spec()

    @property
    def _only(self) -> WanTransformer3DModel | None:
        """The transformer, where there is one for all noise levels."""
        return self._transformers[HIGH_NOISE] if len(self._transformers) == 1 else None

    def _prepare(self, transformer: WanTransformer3DModel) -> None:
        """What is to be done with a transformer before its trained parameters are chosen."""

    def _condition_spec(self) -> ConditionSpec:
        size, first = self.size, next(iter(self._transformers.values()))
        return ConditionSpec(
            latent_shape=(self.pipeline.vae.config.z_dim, *_latent_size(size, self.pipeline)),
            patch_size=tuple(first.config.patch_size),
            source_frames=1 if self._from_image else None,
            source_size=(size.height, size.width) if self._from_image else None,
        )

    @torch.no_grad()
    def encode(self, conditions: Sequence[Condition]) -> list[Conditioning]:
        """Prompts by the text encoder, sources by the VAE; both are on the device only for this call."""
        texts = self._texts.with_negative([c.prompt for c in conditions], self._encode_prompts, self._negative_prompt)
        if not self.condition_spec.source_frames:
            return texts
        cached = CachedEncoder(self.encoding_store, self._source_encoder)
        sources = cached.encode(
            [condition.source_key() for condition in conditions],
            lambda row: first_row(self._encode_sources([conditions[row]])),
        )
        own = [self._own_inputs(condition) for condition in conditions]
        return [{**text, **source, **more} for text, source, more in zip(texts, sources, own, strict=True)]

    @cached_property
    def _texts(self) -> TextEncoder:
        return TextEncoder(self.encoding_store, self._folder, self.pipeline)

    def _source_encoder(self) -> str:
        """A name of what source clips are encoded by."""
        settings = (type(self).__name__, self.size, self.pipeline.vae.dtype)
        return encoder_hash(self._folder, ("vae", "image_encoder", "image_processor"), *settings)

    def _own_inputs(self, condition: Condition) -> Conditioning:
        """What is not worth keeping on the disk."""
        return {}

    def _encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        pipe = self.pipeline
        parts = {"tokenizer": pipe.tokenizer, "text_encoder": pipe.text_encoder, "scheduler": pipe.scheduler}
        text_to_video = WanPipeline(**parts, vae=pipe.vae)  # the other pipeline encodes alike, but only with ftfy
        with on_device(self.device, pipe.text_encoder):
            text, _ = text_to_video.encode_prompt(
                prompts,
                do_classifier_free_guidance=False,
                device=self.device,
                max_sequence_length=text_length(pipe),
            )
        return {"text": text}

    def _encode_sources(self, conditions: Sequence[Condition]) -> Mapping[str, Tensor]:
        """The first frame as the pipeline takes it: its latents with a mask, and for Wan 2.1 its CLIP embedding."""
        images = [image for clip in _sources(conditions, 1) for image in _to_images(clip)]
        pipe, size = self.pipeline, self.size
        pixels = pipe.video_processor.preprocess(images, height=size.height, width=size.width).to(self.device)
        shape = (pipe.vae.config.z_dim, size.height, size.width, size.frames)
        with on_device(self.device, pipe.vae):
            started = [pipe.prepare_latents(image[None], 1, *shape, torch.float32, self.device)[1] for image in pixels]
        encoded = {"image_latents": torch.cat(started)}
        if next(iter(self._transformers.values())).config.image_dim is not None:
            with on_device(self.device, pipe.image_encoder):
                encoded["image"] = torch.cat([pipe.encode_image(image, self.device) for image in images])
        return encoded

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        timestep = self._schedule.timesteps(sigma)
        if self._only is not None:
            return self._velocity(self._only, latents, timestep, conditioning).float()
        velocity = torch.empty_like(latents, dtype=torch.float32)
        for name, rows in self._rows_by_transformer(timestep):
            inputs = {key: column[rows] for key, column in conditioning.items()}
            transformer = self._transformers[name]
            of_rows = call_block(self.policy, self._velocity, transformer, latents[rows], timestep[rows], inputs)
            velocity = velocity.index_copy(0, rows, of_rows.float())
        return velocity

    def _rows_by_transformer(self, timestep: Float[Tensor, " rows"]) -> Iterator[tuple[str, Tensor]]:
        assert self._boundary is not None
        high = timestep >= 1000 * self._boundary
        for name, chosen in ((HIGH_NOISE, high), (LOW_NOISE, ~high)):
            if chosen.any():
                yield name, chosen.nonzero().flatten()

    def _velocity(
        self, transformer: WanTransformer3DModel, latents: Tensor, timestep: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """One timestep per row, also where the pipeline repeats it for each token (the 5B of Wan 2.2).

        Without an image they are all equal, and repeated ones would be six widths of float32 per token in each block.
        """
        dtype, given = transformer.dtype, [latents]
        if "image_latents" in conditioning:
            given.append(conditioning["image_latents"])
        image = conditioning.get("image")
        (velocity,) = transformer(
            hidden_states=torch.cat(given, dim=1).to(dtype),
            timestep=timestep,
            encoder_hidden_states=conditioning["text"].to(dtype),
            encoder_hidden_states_image=image.to(dtype) if image is not None else None,
            return_dict=False,
        )
        return velocity

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        mean, std = (scale.to(latents) for scale in self._latent_scale)
        with on_device(self.device, self.pipeline.vae):
            clips = self.pipeline.vae.decode((latents * std + mean).to(self.pipeline.vae.dtype)).sample
        return clips.clamp(-1, 1).cpu().float()

    @contextmanager
    def reference(self) -> Iterator[None]:
        with ExitStack() as stack:
            for each in self._references:
                stack.enter_context(each())
            yield

    def noise_levels(self, steps: int) -> Sequence[float]:
        return self._schedule.noise_levels(steps)

    def guide(self, positive: Tensor, negative: Tensor, sigma: Tensor, scale: float) -> Tensor:
        """The transformer for low noise levels may have a guidance scale of its own."""
        if self._boundary is None or self._low_noise_guidance_scale is None:
            return guided(positive, negative, scale)
        high = self._schedule.timesteps(sigma) >= 1000 * self._boundary
        rows = (len(positive), *[1] * (positive.ndim - 1))
        scales = torch.where(high, scale, self._low_noise_guidance_scale).view(rows)
        return negative + scales * (positive - negative)

    def idle_parts(self, sigmas: Sequence[float]) -> Sequence[str]:
        if self._only is not None:
            return ()
        used = {name for name, _ in self._rows_by_transformer(self._schedule.timesteps(torch.tensor(sigmas)))}
        return [name for name in self._transformers if name not in used]


class WanCameraModel(WanModel):
    """Wan 2.1 with ReCamMaster's camera layers: the source clip, shown along another camera path."""

    known = ("WanPipeline",)

    def __init__(self, folder: Path, size: ClipSize, *, camera_layers: Path | None = None, **settings: Any):
        if len(transformer_names(folder)) > 1:
            raise UserError(
                f"{folder} has two transformers (Wan 2.2), and camera layers are for pipelines with one. Take a Wan 2.1"
                " pipeline, or train this one with flow-wan."
            )
        self._camera_layers = camera_layers
        super().__init__(folder, size, **settings)

    def _prepare(self, transformer: WanTransformer3DModel) -> None:
        add_camera_layers(transformer)
        if self._camera_layers is not None:
            load_camera_layers(transformer, self._camera_layers)

    def _condition_spec(self) -> ConditionSpec:
        plain, size = super()._condition_spec(), self.size
        return ConditionSpec(
            plain.latent_shape,
            plain.patch_size,
            source_frames=size.frames,
            source_size=(size.height, size.width),
            has_camera=True,
        )

    def _encode_sources(self, conditions: Sequence[Condition]) -> Mapping[str, Tensor]:
        clips = torch.stack(_sources(conditions, self.size.frames))
        with on_device(self.device, self.pipeline.vae):
            latents = self.pipeline.vae.encode(clips.to(self.device, self.pipeline.vae.dtype)).latent_dist.mode()
        mean, std = (scale.to(latents) for scale in self._latent_scale)
        return {"source": (latents - mean) / std}

    def _own_inputs(self, condition: Condition) -> Conditioning:
        assert condition.camera is not None
        return {"camera": condition.camera.float()}

    def _velocity(
        self, transformer: WanTransformer3DModel, latents: Tensor, timestep: Tensor, conditioning: Conditioning
    ) -> Tensor:
        return camera_velocity(transformer, latents, timestep, **conditioning)


def transformer_names(folder: Path) -> list[str]:
    """Which of the two transformers a pipeline folder has."""
    index = read_index(folder)
    return [name for name in (HIGH_NOISE, LOW_NOISE) if (index.get(name) or [None])[0] is not None]


def _boundary(pipeline: Any, names: Sequence[str], folder: Path) -> float | None:
    """The noise level from which the first transformer is used; None where it always is."""
    boundary: float | None = pipeline.config.boundary_ratio
    if (boundary is not None) != (len(names) == 2) or HIGH_NOISE not in names:
        raise UserError(
            f"{folder} has boundary_ratio {boundary} and {' and '.join(names) or 'no transformer'}: a pipeline with"
            " a boundary needs both transformers, one without it only the first. Fix its model_index.json."
        )
    return boundary


def _sources(conditions: Sequence[Condition], frames: int) -> list[Tensor]:
    return [source for source in (condition.read_source(frames) for condition in conditions) if source is not None]


def _to_images(clip: Float[Tensor, "3 frames height width"]) -> list[Any]:
    """PIL images of the frames."""
    pixels = ((clip + 1) / 2).clamp(0, 1).permute(1, 2, 3, 0)
    images: list[Any] = numpy_to_pil(pixels.numpy())
    return images


def _latent_scale(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and std of the VAE's latents, by channel."""
    mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)


def _latent_size(size: ClipSize, pipeline: Any) -> tuple[int, int, int]:
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
