"""MolmoE: overlapping tiles of an image and an overview, whose features are added to the tokens of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.workloads.controller.model.adapters.base import Encoded, Prompt, Sample, TextModelMixin
from groupwise.workloads.controller.model.images import (
    CropShape,
    ImageNormalization,
    LazyCrops,
    Sides,
    SourceImage,
    crop_shapes,
)
from groupwise.workloads.controller.model.knobs import KnobOptions
from groupwise.workloads.controller.model.molmoe.sizes import IMAGE_TOKENS, PUBLISHED_DROP_ORDER, image_token_count
from groupwise.workloads.controller.model.molmoe.tiling import (
    Tiling,
    feature_order,
    image_masks,
    tile_by_tier,
    tile_shapes,
    token_layout,
)

_PUBLISHED_SIZE = (16, 64, 2048)
"""Blocks, experts and width of MolmoE-1B."""


class MolmoeAdapter(TextModelMixin):
    """`MolmoeForConditionalGeneration`: a tier is the largest number of tiles."""

    def encode(self, inputs: Sequence[tuple[Sample, str]], texts: Mapping[str, Tensor] | None = None) -> Encoded:
        """An overview goes through the vision tower once for all tiers. Its features differ by tier: see
        `image_masks`."""
        overviews = {id(sample.crops_by_tier): sample.crops_by_tier[tier][:1] for sample, tier in inputs}
        tiles = {(id(sample.crops_by_tier), tier): sample.crops_by_tier[tier][1:] for sample, tier in inputs}
        pixels = torch.cat([*overviews.values(), *tiles.values()]).to(self.device)
        features = self.model.model.crop_features(pixels)
        counts = [len(crops) for crops in (*overviews.values(), *tiles.values())]
        features_of = dict(zip([*overviews, *tiles], features.split(counts), strict=True))
        tilings = {
            (id(sample.crops_by_tier), tier): Tiling.of_shape(crop_shapes(sample.crops_by_tier)[tier])
            for sample, tier in inputs
        }
        images = self._images({key: (features_of[key[0]], features_of[key]) for key in tilings}, tilings)
        prompts = []
        for sample, tier in inputs:
            states = self._insert_image(sample, images[id(sample.crops_by_tier), tier], texts)
            extended = torch.arange(len(states) + 1)[None]
            prompts.append(Prompt(states, extended[:, :-1], extended, len(states), len(sample.prefix_ids)))
        return Encoded(prompts, len(pixels))

    def _images(
        self, features: Mapping[tuple[int, str], tuple[Tensor, Tensor]], tilings: Mapping[tuple[int, str], Tiling]
    ) -> dict[tuple[int, str], Float[Tensor, "tokens width"]]:
        """The embeddings of each image's tokens, with the projected features added to those of patches."""
        masks = [image_masks(tiling) for tiling in tilings.values()]
        joined = torch.cat([crops for pair in features.values() for crops in pair])
        projected = self.model.model.connector(joined, torch.cat(masks).to(self.device))
        images = {}
        for (key, tiling), own in zip(tilings.items(), projected.split([len(mask) for mask in masks]), strict=True):
            tokens, patches = token_layout(tiling.rows, tiling.columns, self._layout_ids)
            image = self.embed(tokens)
            image[patches] += own.flatten(0, 1)[feature_order(tiling.rows, tiling.columns)]
            images[key] = image
        return images

    @property
    def _layout_ids(self) -> tuple[int, int, int, int]:
        start, end, patch, column = (self.model.config.image_token_ids[name] for name in IMAGE_TOKENS[:4])
        return start, end, patch, column

    def tiers(self) -> dict[str, Mapping[str, int]]:
        return {"crops_by_tier": {"low": 3, "medium": 6, "high": 12}}

    @property
    def published_drop_order(self) -> Sequence[int]:
        text = self.text_config
        size = text.num_hidden_layers, text.num_experts, text.hidden_size
        return PUBLISHED_DROP_ORDER if size == _PUBLISHED_SIZE else ()

    @property
    def probe_shapes(self) -> Sequence[tuple[float, float]]:
        """Photos of usual shapes, the most usual first: each has another number of tiles."""
        return ((0.75, 1.0), (1.0, 0.75), (1.0, 1.0), (0.5625, 1.0), (1.0, 0.5), (0.33, 1.0), (0.2, 0.3))

    def crop(self, image: SourceImage, options: KnobOptions, normalization: ImageNormalization) -> LazyCrops:
        return tile_by_tier(image, options.crops_by_tier, normalization)

    def crop_shapes(self, sides: Sides, options: KnobOptions) -> dict[str, CropShape]:
        return tile_shapes(sides, options.crops_by_tier)

    def finest_sides(self, sides: Sides, options: KnobOptions) -> Sides:
        """All pixels: shrinking an image in two steps would not give the published crops."""
        return sides

    def image_tokens(self, shape: Sequence[int]) -> int:
        tiling = Tiling.of_shape(shape)
        return image_token_count(tiling.rows, tiling.columns)
