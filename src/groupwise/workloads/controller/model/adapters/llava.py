"""LLaVA: a vision tower that takes crops of one size, a projector and a text model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from groupwise.workloads.controller.model.adapters.base import Encoded, Prompt, Sample, TextModelMixin
from groupwise.workloads.controller.model.images import (
    CropShape,
    ImageNormalization,
    LazyCrops,
    Sides,
    SourceImage,
    crop_by_tier,
    grid_shapes,
    largest_grid,
)
from groupwise.workloads.controller.model.knobs import KnobOptions


# The same object for each prompt of a length: rotary embeddings are found again by it.
@lru_cache(maxsize=256)
def _positions(tokens: int) -> Int64[Tensor, "1 tokens"]:
    return torch.arange(tokens)[None]


class LlavaAdapter(TextModelMixin):
    """`LlavaForConditionalGeneration` with any text model that has rotary positions."""

    def encode(self, inputs: Sequence[tuple[Sample, str]], texts: Mapping[str, Tensor] | None = None) -> Encoded:
        overviews = {id(sample.crops_by_tier): sample.crops_by_tier[tier][:1] for sample, tier in inputs}
        details = {(id(sample.crops_by_tier), tier): sample.crops_by_tier[tier][1:] for sample, tier in inputs}
        pixels = torch.cat([*overviews.values(), *details.values()]).to(self.device)
        features = self.model.get_image_features(pixel_values=pixels, **self._feature_choice).pooler_output
        features = features if isinstance(features, Tensor) else torch.stack(list(features))
        counts = [len(crops) for crops in (*overviews.values(), *details.values())]
        features_of = dict(zip([*overviews, *details], features.split(counts), strict=True))
        prompts = []
        for sample, tier in inputs:
            image_id = id(sample.crops_by_tier)
            image = torch.cat([features_of[image_id], features_of[image_id, tier]]).flatten(0, 1)
            states = self._insert_image(sample, image, texts)
            tokens = len(states)
            prompts.append(Prompt(states, _positions(tokens), _positions(tokens + 1), tokens))
        return Encoded(prompts, len(pixels))

    @property
    def _feature_choice(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "vision_feature_layer": config.vision_feature_layer,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
        }

    def rotary(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = self.text.rotary_emb(self.text.norm.weight[None, None], position_ids.to(self.device))
        return cosines, sines

    def tiers(self) -> dict[str, Mapping[str, int]]:
        return {"crops_by_tier": {"low": 3, "medium": 6, "high": 12}}

    def crop(self, image: SourceImage, options: KnobOptions, normalization: ImageNormalization) -> LazyCrops:
        return crop_by_tier(image, options.crops_by_tier, normalization=normalization, **self._crop_sides)

    def crop_shapes(self, sides: Sides, options: KnobOptions) -> dict[str, CropShape]:
        return grid_shapes(sides, options.crops_by_tier, **self._crop_sides)

    def finest_sides(self, sides: Sides, options: KnobOptions) -> Sides:
        return largest_grid(sides, options.crops_by_tier.values(), side=self._crop_sides["side"])

    @property
    def _crop_sides(self) -> dict[str, int]:
        vision = self.model.config.vision_config
        return {"side": vision.image_size, "patch": vision.patch_size}

    def image_tokens(self, shape: Sequence[int]) -> int:
        vision, tower = self.model.config.vision_config, self.model.model.vision_tower
        patches = (vision.image_size // vision.patch_size) ** 2
        has_class_token = any(name.endswith("class_embedding") for name, _ in tower.named_parameters())
        drops_first_token = self.model.config.vision_feature_select_strategy == "default"
        return shape[0] * (patches + has_class_token - drops_first_token)
