"""Qwen's models: one image of any size per tier, merged patches, positions on three axes, and deepstack features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.workloads.controller.model.adapters.base import Encoded, Prompt, Sample, TextModelMixin
from groupwise.workloads.controller.model.images import (
    CropShape,
    ImageNormalization,
    LazyCrops,
    Sides,
    SourceImage,
    resize_by_tier,
    resized_shape,
    resized_shapes,
)
from groupwise.workloads.controller.model.knobs import KnobOptions

_MAX_IMAGE_TOKENS = 1024


class QwenAdapter(TextModelMixin):
    """Qwen3-VL, with experts or dense, and the dense Qwen2.5-VL and Qwen2-VL.

    The vision tower of Qwen3-VL also returns deepstack features, which are added to the image's tokens after the first
    blocks. They are tied to a block's index in the whole model: dropping a block neither shifts nor removes them.
    """

    def encode(self, inputs: Sequence[tuple[Sample, str]], texts: Mapping[str, Tensor] | None = None) -> Encoded:
        images = {(id(sample.crops_by_tier), tier): sample.crops_by_tier[tier][0] for sample, tier in inputs}
        patches = torch.cat([self._patches(image) for image in images.values()])
        grids = {key: self._grid(image) for key, image in images.items()}
        output = self.model.get_image_features(
            pixel_values=patches.to(self.device), image_grid_thw=torch.tensor(list(grids.values()), device=self.device)
        )
        features = dict(zip(images, output.pooler_output, strict=True))
        deepstacks = dict.fromkeys(images, ())
        if getattr(output, "deepstack_features", None):
            deepstacks = dict(zip(images, zip(*output.deepstack_features, strict=True), strict=True))
        prompts = []
        for sample, tier in inputs:
            key = id(sample.crops_by_tier), tier
            states = self._insert_image(sample, features[key], texts)
            extended = self._position_ids(grids[key], len(sample.prefix_ids), len(sample.question_ids) + 1)
            prompts.append(
                Prompt(
                    states,
                    extended[:, :-1],
                    extended,
                    int(extended[0, -1]),
                    len(sample.prefix_ids),
                    deepstacks[key],
                )
            )
        return Encoded(prompts, len(images), len(patches))

    def _stock_inputs(self, sample: Sample, tier: str, answer: Sequence[int]) -> dict[str, Any]:
        image = sample.crops_by_tier[tier][0]
        ids = self._token_ids(sample, self.image_tokens(sample.crops_by_tier[tier].shape), answer)
        is_image = torch.zeros_like(ids, dtype=torch.int32)
        is_image[:, len(sample.prefix_ids) : ids.shape[1] - len(sample.question_ids) - len(answer)] = 1
        return {
            "input_ids": ids,
            "mm_token_type_ids": is_image,
            "pixel_values": self._patches(image).to(self.device),
            "image_grid_thw": torch.tensor([self._grid(image)], device=self.device),
        }

    def _grid(self, image: Float[Tensor, "channels height width"]) -> tuple[int, int, int]:
        """Patches over time, height and width."""
        side = self.model.config.vision_config.patch_size
        return 1, image.shape[1] // side, image.shape[2] // side

    def _patches(self, image: Float[Tensor, "channels height width"]) -> Float[Tensor, "patches pixels"]:
        """Patches in the order of the tower: those that merge into one token are adjacent. The one frame is repeated
        over time."""
        vision = self.model.config.vision_config
        side, merge, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        _, height, width = self._grid(image)
        parts = image.view(len(image), height // merge, merge, side, width // merge, merge, side)
        parts = parts.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        return parts.expand(-1, -1, -1, -1, -1, frames, -1, -1).reshape(height * width, -1)

    def _position_ids(self, grid: tuple[int, int, int], prefix: int, question: int) -> Int64[Tensor, "3 tokens"]:
        """Text advances on all axes alike; an image token has its own row and column, at one point in time."""
        merge = self.model.config.vision_config.spatial_merge_size
        height, width = grid[1] // merge, grid[2] // merge
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        image = prefix + torch.stack([torch.zeros_like(rows), rows, columns]).flatten(1)
        after = prefix + max(height, width) + torch.arange(question)
        return torch.cat([torch.arange(prefix).expand(3, -1), image, after.expand(3, -1)], dim=1)

    def _rotary_position_ids(self, position_ids: Tensor) -> Tensor:
        return position_ids[:, None]

    @property
    def _pixels_per_token_side(self) -> int:
        vision = self.model.config.vision_config
        return vision.patch_size * vision.spatial_merge_size

    def tiers(self) -> dict[str, Mapping[str, int]]:
        """A quarter, a half and the whole of 1,024 image tokens, or of a quarter of the context if that is less."""
        largest = min(_MAX_IMAGE_TOKENS, self.text_config.max_position_embeddings // 4)
        tokens = {"low": largest // 4, "medium": largest // 2, "high": largest}
        pixels = {tier: count * self._pixels_per_token_side**2 for tier, count in tokens.items()}
        return {"crops_by_tier": dict.fromkeys(tokens, 0), "pixels": pixels}

    def crop(self, image: SourceImage, options: KnobOptions, normalization: ImageNormalization) -> LazyCrops:
        return resize_by_tier(image, options.pixels, multiple=self._pixels_per_token_side, normalization=normalization)

    def crop_shapes(self, sides: Sides, options: KnobOptions) -> dict[str, CropShape]:
        return resized_shapes(sides, options.pixels, multiple=self._pixels_per_token_side)

    def finest_sides(self, sides: Sides, options: KnobOptions) -> Sides:
        return resized_shape(max(options.pixels.values()), *sides, self._pixels_per_token_side)

    def image_tokens(self, shape: Sequence[int]) -> int:
        return shape[2] * shape[3] // self._pixels_per_token_side**2
