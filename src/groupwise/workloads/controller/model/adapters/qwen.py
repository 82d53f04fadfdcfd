"""Qwen3-VL: one image of any size per tier, merged patches, positions on three axes, and deepstack features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int64
from PIL.Image import Image
from torch import Tensor

from groupwise.workloads.controller.model.adapters.base import Encoded, Prompt, Sample, TextModelMixin
from groupwise.workloads.controller.model.images import ImageNormalization, images_by_tier
from groupwise.workloads.controller.model.knobs import KnobOptions

_MOST_IMAGE_TOKENS = 1024


class QwenAdapter(TextModelMixin):
    """`Qwen3VLMoeForConditionalGeneration`, and its dense sibling.

    The vision tower also yields features that are added to the image's tokens after the first blocks. They stay with
    the number that a block has in the whole model: dropping a block moves none of them, nor takes one away.
    """

    def encode(self, heads: Sequence[tuple[Sample, str]]) -> Encoded:
        images = {(id(sample.crops), tier): sample.crops[tier][0] for sample, tier in heads}
        patches = torch.cat([self._patches(image) for image in images.values()])
        grids = {head: self._grid(image) for head, image in images.items()}
        found = self.model.get_image_features(
            pixel_values=patches.to(self.device), image_grid_thw=torch.tensor(list(grids.values()), device=self.device)
        )
        features = dict(zip(images, found.pooler_output, strict=True))
        deepstacks = dict(zip(images, zip(*found.deepstack_features, strict=True), strict=True))
        prompts = []
        for sample, tier in heads:
            image = id(sample.crops), tier
            states = self._around(sample, features[image])
            places = self._places(grids[image], len(sample.before), len(sample.question))
            prompts.append(Prompt(states, places, int(places.max()) + 1, len(sample.before), deepstacks[image]))
        return Encoded(prompts, len(images), len(patches))

    def _grid(self, image: Float[Tensor, "channels height width"]) -> tuple[int, int, int]:
        """Patches over time, down and across."""
        side = self.model.config.vision_config.patch_size
        return 1, image.shape[1] // side, image.shape[2] // side

    def _patches(self, image: Float[Tensor, "channels height width"]) -> Float[Tensor, "patches pixels"]:
        """Patches in the order of the tower: those that are merged into one token stand together. Time is one frame,
        repeated."""
        vision = self.model.config.vision_config
        side, merge, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        _, down, across = self._grid(image)
        parts = image.view(len(image), down // merge, merge, side, across // merge, merge, side)
        parts = parts.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        return parts.expand(-1, -1, -1, -1, -1, frames, -1, -1).reshape(down * across, -1)

    def _places(self, grid: tuple[int, int, int], before: int, after: int) -> Int64[Tensor, "3 tokens"]:
        """Words count on all axes alike; an image's token has its own row and column, and time stands still in it."""
        merge = self.model.config.vision_config.spatial_merge_size
        down, across = grid[1] // merge, grid[2] // merge
        rows, columns = torch.meshgrid(torch.arange(down), torch.arange(across), indexing="ij")
        image = before + torch.stack([torch.zeros_like(rows), rows, columns]).flatten(1)
        question = before + max(down, across) + torch.arange(after)
        return torch.cat([torch.arange(before).expand(3, -1), image, question.expand(3, -1)], dim=1)

    def rotary(self, places: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = self.text.rotary_emb(self.text.norm.weight[None, None], places[:, None].to(self.device))
        return cosines, sines

    @property
    def _pixels_per_token_side(self) -> int:
        vision = self.model.config.vision_config
        return vision.patch_size * vision.spatial_merge_size

    def tiers(self) -> dict[str, Mapping[str, int]]:
        """A quarter, a half and the whole of 1,024 image tokens, or of a quarter of the context if that is less."""
        most = min(_MOST_IMAGE_TOKENS, self.text_config.max_position_embeddings // 4)
        tokens = {"low": most // 4, "medium": most // 2, "high": most}
        pixels = {tier: count * self._pixels_per_token_side**2 for tier, count in tokens.items()}
        return {"crops": dict.fromkeys(tokens, 0), "pixels": pixels}

    def cut(self, image: Image, options: KnobOptions, statistics: ImageNormalization) -> dict[str, Tensor]:
        return images_by_tier(image, options.pixels, self._pixels_per_token_side, statistics)

    def image_tokens(self, crops: Tensor) -> int:
        return crops.shape[2] * crops.shape[3] // self._pixels_per_token_side**2
