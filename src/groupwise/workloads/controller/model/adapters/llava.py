"""LLaVA, LLaVA-NeXT and InternVL: a vision tower that takes crops of one size, a projector and a text model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.transfer import send
from groupwise.workloads.controller.model.adapters.base import (
    Encoded,
    Prompt,
    Sample,
    TextModelMixin,
    image_side,
    patch_side,
)
from groupwise.workloads.controller.model.images import (
    CropShape,
    Grid,
    ImageNormalization,
    LazyCrops,
    Sides,
    SourceImage,
    best_grid,
    crop_by_tier,
    crop_shapes,
    grid_shapes,
    largest_grid,
)
from groupwise.workloads.controller.model.knobs import KnobOptions


# The same object for each prompt of a length: rotary embeddings are found again by it.
@lru_cache(maxsize=256)
def _positions(tokens: int) -> Int64[Tensor, "1 tokens"]:
    return torch.arange(tokens)[None]


class LlavaAdapter(TextModelMixin):
    """`LlavaForConditionalGeneration` with a vision tower of one image size and a text model with rotary positions."""

    def __init__(self, model: Any):
        vision = model.config.vision_config
        if vision.model_type == "pixtral":
            raise UserError(
                f"{type(model).__name__} with the vision tower {vision.model_type!r} cannot be controlled: the tower"
                " takes images of any size, where this adapter cuts crops of one size. Take a model that"
                " docs/model-families.md lists as equal."
            )
        super().__init__(model)

    def encode(self, inputs: Sequence[tuple[Sample, str]], texts: Mapping[str, Tensor] | None = None) -> Encoded:
        overviews = {id(sample.crops_by_tier): sample.crops_by_tier[tier][:1] for sample, tier in inputs}
        details = {(id(sample.crops_by_tier), tier): sample.crops_by_tier[tier][1:] for sample, tier in inputs}
        pixels = send(torch.cat([*overviews.values(), *details.values()]), self.device)
        features = self.model.get_image_features(pixel_values=pixels, **self._feature_choice).pooler_output
        features = features if isinstance(features, Tensor) else torch.stack(list(features))
        counts = [len(crops) for crops in (*overviews.values(), *details.values())]
        features_of = dict(zip([*overviews, *details], features.split(counts), strict=True))
        prompts = []
        for sample, tier in inputs:
            image_id = id(sample.crops_by_tier)
            image = self._arrange(features_of[image_id], features_of[image_id, tier]).flatten(0, 1)
            states = self._insert_image(sample, image, texts)
            tokens = len(states)
            prompts.append(Prompt(states, _positions(tokens), _positions(tokens + 1), tokens))
        return Encoded(prompts, len(pixels))

    def _arrange(self, overview: Tensor, details: Tensor) -> Tensor:
        """Crops, or what the tower made of them, in the order in which the text model sees them."""
        return torch.cat([overview, details])

    @property
    def _feature_choice(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "vision_feature_layer": config.vision_feature_layer,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
        }

    def _stock_inputs(self, sample: Sample, tier: str, answer: Sequence[int]) -> dict[str, Any]:
        crops = sample.crops_by_tier[tier].to(self.device, self.model.dtype)
        ids = self._token_ids(sample, self.image_tokens(crops.shape), answer)
        return {"input_ids": ids, "pixel_values": self._arrange(crops[:1], crops[1:])}

    def tiers(self) -> dict[str, Mapping[str, int]]:
        return {"crops_by_tier": {"low": 3, "medium": 6, "high": 12}}

    def crop(self, image: SourceImage, options: KnobOptions, normalization: ImageNormalization) -> LazyCrops:
        return crop_by_tier(
            image, options.crops_by_tier, normalization=normalization, grid_of=self._grid_of, **self._crop_sides
        )

    def crop_shapes(self, sides: Sides, options: KnobOptions) -> dict[str, CropShape]:
        return grid_shapes(sides, options.crops_by_tier, grid_of=self._grid_of, **self._crop_sides)

    def finest_sides(self, sides: Sides, options: KnobOptions) -> Sides:
        side = self._crop_sides["side"]
        return largest_grid(sides, options.crops_by_tier.values(), side=side, grid_of=self._grid_of)

    def _grid_of(self, count: int, height: int, width: int) -> Grid:
        return best_grid(count, height, width)

    @property
    def _crop_sides(self) -> dict[str, int]:
        vision = self.model.config.vision_config
        return {"side": image_side(vision), "patch": patch_side(vision)}

    def image_tokens(self, shape: Sequence[int]) -> int:
        return shape[0] * self._tokens_per_crop

    @property
    def _tokens_per_crop(self) -> int:
        vision, tower = self.model.config.vision_config, self.model.model.vision_tower
        patches = (image_side(vision) // patch_side(vision)) ** 2
        has_class_token = any(name.endswith("class_embedding") for name, _ in tower.named_parameters())
        drops_first_token = self.model.config.vision_feature_select_strategy == "default"
        return patches + has_class_token - drops_first_token


class InternVLAdapter(LlavaAdapter):
    """`InternVLForConditionalGeneration`: the overview comes last, and 2 x 2 patches become one token."""

    def _arrange(self, overview: Tensor, details: Tensor) -> Tensor:
        return torch.cat([details, overview])

    @property
    def _tokens_per_crop(self) -> int:
        vision = self.model.config.vision_config
        return int(image_side(vision) // patch_side(vision) * self.model.config.downsample_ratio) ** 2

    def image_delimiters(self, tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        names = ("start_image_token", "end_image_token")
        tokens = [getattr(tokenizer, name, None) for name in names]
        if None in tokens:
            raise UserError(
                f"The tokenizer of this InternVL has no {names[tokens.index(None)]}, which belongs beside the image."
                " Take the tokenizer that was saved with the model."
            )
        before, after = tokenizer.convert_tokens_to_ids(tokens)
        return (before,), (after,)


class LlavaNextAdapter(LlavaAdapter):
    """`LlavaNextForConditionalGeneration`: crops in one of the model's own grids, joined to one image. Each row of its
    patches ends with a token."""

    def encode(self, inputs: Sequence[tuple[Sample, str]], texts: Mapping[str, Tensor] | None = None) -> Encoded:
        images = {(id(sample.crops_by_tier), tier): sample.crops_by_tier for sample, tier in inputs}
        pixels = send(torch.cat([crops[tier] for (_, tier), crops in images.items()]), self.device)
        sizes = [self._grid_pixels(crop_shapes(crops)[tier]) for (_, tier), crops in images.items()]
        output = self.model.get_image_features(
            pixel_values=pixels, image_sizes=torch.tensor(sizes, device=self.device), **self._feature_choice
        )
        features = dict(zip(images, output.pooler_output, strict=True))
        prompts = []
        for sample, tier in inputs:
            states = self._insert_image(sample, features[id(sample.crops_by_tier), tier], texts)
            tokens = len(states)
            prompts.append(Prompt(states, _positions(tokens), _positions(tokens + 1), tokens))
        return Encoded(prompts, len(pixels))

    def _stock_inputs(self, sample: Sample, tier: str, answer: Sequence[int]) -> dict[str, Any]:
        shape = crop_shapes(sample.crops_by_tier)[tier]
        return {
            "input_ids": self._token_ids(sample, self.image_tokens(shape), answer),
            "pixel_values": sample.crops_by_tier[tier][None].to(self.device, self.model.dtype),
            "image_sizes": torch.tensor([self._grid_pixels(shape)], device=self.device),
        }

    def _grid_pixels(self, shape: Sequence[int]) -> Sides:
        """Height and width of all crops together, which is how the model knows their grid."""
        *_, height, width, rows, columns = shape
        return rows * height, columns * width

    @property
    def _grids(self) -> dict[int, list[Grid]]:
        """The grids that the model was trained with, by their number of crops."""
        side, grids = self._crop_sides["side"], dict[int, list[Grid]]()
        for height, width in self.model.config.image_grid_pinpoints:
            rows, columns = height // side, width // side
            grids.setdefault(rows * columns, []).append((rows, columns))
        return dict(sorted(grids.items()))

    def _grid_of(self, count: int, height: int, width: int) -> Grid:
        if count not in self._grids:
            known = ", ".join(map(str, self._grids))
            raise UserError(
                f"This model has no grid of {count} crops: it was trained with {known}. Offer some of these."
            )
        return best_grid(count, height, width, self._grids[count])

    def tiers(self) -> dict[str, Mapping[str, int]]:
        """The fewest crops, the most, and a number between them if there is one."""
        counts = list(self._grids)
        chosen = {"low": counts[0], "medium": counts[len(counts) // 2], "high": counts[-1]}
        return {"crops_by_tier": {tier: count for tier, count in chosen.items() if tier == "low" or count > counts[0]}}

    def crop(self, image: SourceImage, options: KnobOptions, normalization: ImageNormalization) -> LazyCrops:
        cut = super().crop(image, options, normalization)
        shapes, pixels = self.crop_shapes(image.sides, options), image.pixels.numel() // 3
        return LazyCrops(shapes, cut.__getitem__, pixels, overview=cut.overview)

    def crop_shapes(self, sides: Sides, options: KnobOptions) -> dict[str, CropShape]:
        """With the rows and columns of the grid."""
        shapes = super().crop_shapes(sides, options)
        return {tier: (*shape, *self._grid_of(options.crops_by_tier[tier], *sides)) for tier, shape in shapes.items()}

    def image_tokens(self, shape: Sequence[int]) -> int:
        rows, columns = shape[4:]
        patches = self._crop_sides["side"] // self._crop_sides["patch"]
        return self._tokens_per_crop + rows * patches * (columns * patches + 1)
