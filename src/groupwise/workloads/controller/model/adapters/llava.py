"""LLaVA's composition: a vision tower that sees crops of one size, a projector and a text model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from groupwise.workloads.controller.model.adapters.base import Encoded, Prompt, Sample, TextModelMixin
from groupwise.workloads.controller.model.images import ImageNormalization, crops_by_tier
from groupwise.workloads.controller.model.knobs import KnobOptions


class LlavaAdapter(TextModelMixin):
    """`LlavaForConditionalGeneration`: a vision tower, a projector and any text model with rotary positions."""

    def encode(self, heads: Sequence[tuple[Sample, str]]) -> Encoded:
        overviews = {id(sample.crops): sample.crops[tier][:1] for sample, tier in heads}
        details = {(id(sample.crops), tier): sample.crops[tier][1:] for sample, tier in heads}
        pixels = torch.cat([*overviews.values(), *details.values()]).to(self.device)
        features = self.model.get_image_features(pixel_values=pixels, **self._feature_choice).pooler_output
        features = features if isinstance(features, Tensor) else torch.stack(list(features))
        counts = [len(crops) for crops in (*overviews.values(), *details.values())]
        parts = dict(zip([*overviews, *details], features.split(counts), strict=True))
        prompts = []
        for sample, tier in heads:
            image = torch.cat([parts[id(sample.crops)], parts[id(sample.crops), tier]]).flatten(0, 1)
            states = self._around(sample, image)
            prompts.append(Prompt(states, torch.arange(len(states))[None], len(states)))
        return Encoded(prompts, len(pixels))

    @property
    def _feature_choice(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "vision_feature_layer": config.vision_feature_layer,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
        }

    def rotary(self, places: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = self.text.rotary_emb(self.text.norm.weight[None, None], places.to(self.device))
        return cosines, sines

    def tiers(self) -> dict[str, Mapping[str, int]]:
        return {"crops": {"low": 3, "medium": 6, "high": 12}}

    def cut(self, image: Image, options: KnobOptions, statistics: ImageNormalization) -> dict[str, Tensor]:
        vision = self.model.config.vision_config
        return crops_by_tier(image, options.crops, vision.image_size, vision.patch_size, statistics)

    def image_tokens(self, crops: Tensor) -> int:
        vision, tower = self.model.config.vision_config, self.model.model.vision_tower
        patches = (vision.image_size // vision.patch_size) ** 2
        leading = any(name.endswith("class_embedding") for name, _ in tower.named_parameters())
        left_out = self.model.config.vision_feature_select_strategy == "default"
        return len(crops) * (patches + leading - left_out)
