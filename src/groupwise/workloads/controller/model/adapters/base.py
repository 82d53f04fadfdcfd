"""ModelAdapter, its inputs and outputs, the text side that all families share, and the default knobs of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from groupwise.workloads.controller.config import OVERVIEW_SIDE
from groupwise.workloads.controller.model.images import CropShape, ImageNormalization, LazyCrops, Sides, SourceImage
from groupwise.workloads.controller.model.knobs import KnobOptions

_LATEST_INSERTION_POSITION = 5


@dataclass(frozen=True)
class Sample:
    """An image, prepared for every tier, and a question about it."""

    name: str
    """Identifies the sample: a hash of its content."""
    crops_by_tier: Mapping[str, Float[Tensor, "crops channels height width"]]
    """The input of the vision tower at each tier; LazyCrops are cut when they are read. LLaVA: crops of one size,
    first the overview, which is the same in all tiers. Qwen: one image of the tier's height and width."""
    question_ids: tuple[int, ...]
    """Token ids after the image."""
    prefix_ids: tuple[int, ...] = ()
    """Token ids before the image."""
    overview: Float[Tensor, " pixels"] | None = None
    """The whole image in OVERVIEW_SIDE x OVERVIEW_SIDE gray pixels, where it is known without the crops."""


def overview_pixels(sample: Sample) -> Float[Tensor, " pixels"]:
    """The whole image in few pixels: what the controller may look at before anything runs."""
    if sample.overview is not None:
        return sample.overview
    crops = sample.crops_by_tier
    if isinstance(crops, LazyCrops) and crops.overview is not None:
        whole = crops.overview()
    else:
        whole = next(iter(crops.values()))[0]
    return adaptive_avg_pool2d(whole.float().mean(0)[None], OVERVIEW_SIDE).flatten().cpu()


@dataclass(frozen=True)
class Prompt:
    """The input of the first block for one (sample, tier)."""

    states: Float[Tensor, "tokens width"]
    position_ids: Int64[Tensor, "axes tokens"]
    """Rotary positions: one axis, or three for time, height and width."""
    extended_position_ids: Int64[Tensor, "axes tokens_and_next"]
    """The same, and those of one more token of text."""
    next_position: int
    """Position of the answer's first token, on every axis."""
    image_start: int = 0
    """Index of the image's first token."""
    deepstack: Sequence[Float[Tensor, "image width"]] = ()
    """Features to add to the image's tokens after block 0, 1, ..., also where that block does not run."""

    def add_deepstack(self, block: int, states: Float[Tensor, "more width"]) -> Float[Tensor, "more width"]:
        """States of this prompt, and of tokens after it, with the features that belong after this block."""
        if block >= len(self.deepstack):
            return states
        added = self.deepstack[block].to(states)
        states = states.clone()
        states[self.image_start : self.image_start + len(added)] += added
        return states


@dataclass(frozen=True)
class Encoded:
    """Prompts, and counts of what went through the vision tower for them."""

    prompts: list[Prompt]
    crops: int
    patches: int = 0
    """Counted where a tier is a number of pixels."""


class ModelAdapter(Protocol):
    """Access to a model's vision tower, its blocks and its head. One small class per model family."""

    model: Any
    """A transformers model."""
    blocks: nn.ModuleList
    text_config: Any

    @property
    def published_drop_order(self) -> Sequence[int]:
        """The blocks of this very model that others have found to matter least; empty where nothing is known."""
        ...

    @property
    def probe_shapes(self) -> Sequence[tuple[float, float]]:
        """Heights and widths of images to time answers with, as parts of their longest side."""
        ...

    def encode(
        self, inputs: Sequence[tuple[Sample, str]], texts: Mapping[str, Float[Tensor, "tokens width"]] | None = None
    ) -> Encoded:
        """The prompt of each (sample, tier). Every image goes through the vision tower once per tier.

        `texts` are what `embed_text` returned for some samples, by their names.
        """
        ...

    def embed_text(self, sample: Sample) -> Float[Tensor, "tokens width"]:
        """Embeddings of the text before and after a sample's image."""
        ...

    def rotary(self, position_ids: Int64[Tensor, "axes tokens"]) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines of packed tokens."""
        ...

    def embed(self, tokens: Int64[Tensor, " tokens"]) -> Float[Tensor, "tokens width"]:
        """Embeddings of text tokens."""
        ...

    def logits(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows words"]:
        """Logits of the next token."""
        ...

    def tiers(self) -> dict[str, Mapping[str, int]]:
        """The family's default tiers, as fields of KnobOptions."""
        ...

    def crop(self, image: SourceImage, options: KnobOptions, normalization: ImageNormalization) -> LazyCrops:
        """An image as `Sample.crops_by_tier`; refused if it has too few pixels."""
        ...

    def crop_shapes(self, sides: Sides, options: KnobOptions) -> dict[str, CropShape]:
        """The shapes of each tier for an image of these sides; refused if it has too few pixels."""
        ...

    def finest_sides(self, sides: Sides, options: KnobOptions) -> Sides:
        """The pixels, height and width, that the finest tier shows of an image of these sides."""
        ...

    def image_tokens(self, shape: Sequence[int]) -> int:
        """How many tokens the crops of one tier become, by their shape."""
        ...


class TextModelMixin:
    """Blocks, embeddings and head of a transformers model that is composed of a vision tower and a text model."""

    def __init__(self, model: Any):
        self.model = model
        self.text = model.model.language_model
        self.blocks: nn.ModuleList = self.text.layers
        self.text_config = model.config.text_config
        self.embedding: nn.Module = model.get_input_embeddings()
        _mark_renormalizing(self.blocks)

    @property
    def published_drop_order(self) -> Sequence[int]:
        return ()

    @property
    def probe_shapes(self) -> Sequence[tuple[float, float]]:
        return ((1.0, 1.0),)

    @property
    def device(self) -> torch.device:
        return self.text.norm.weight.device

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens.to(self.device))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(self.text.norm(hidden))

    def embed_text(self, sample: Sample) -> Tensor:
        return self.embed(torch.tensor(sample.prefix_ids + sample.question_ids))

    def _insert_image(
        self, sample: Sample, image: Float[Tensor, "image width"], texts: Mapping[str, Tensor] | None
    ) -> Float[Tensor, "tokens width"]:
        """The image's embeddings between those of the text."""
        text = texts[sample.name] if texts and sample.name in texts else self.embed_text(sample)
        prefix, question = text.split([len(sample.prefix_ids), len(sample.question_ids)])
        return torch.cat([prefix, image.to(text.dtype), question])


def default_options(adapter: ModelAdapter, drop_order: Sequence[int] | None = None) -> KnobOptions:
    """Up to a quarter of the blocks can be dropped, top-k goes down to half, insertion positions are 1 to 5, and the
    tiers are the family's. Without a measured `drop_order` it is the published one, completed by a guess.
    """
    total, top_k = len(adapter.blocks), full_top_k(adapter)
    latest = max(1, min(_LATEST_INSERTION_POSITION, total - 1 - total // 4))
    order = tuple(default_drop_order(total, adapter.published_drop_order) if drop_order is None else drop_order)
    tiers = adapter.tiers()
    return KnobOptions(
        crops_by_tier=tiers["crops_by_tier"],
        total_blocks=total,
        full_top_k=top_k,
        drop_order=order,
        insertion_positions=tuple(range(1, latest + 1)),
        max_dropped_blocks=min(total // 4, sum(block >= latest for block in order)),
        smallest_top_k=(top_k + 1) // 2,
        dense_blocks=dense_blocks(adapter) if top_k else (),
        pixels=tiers.get("pixels", {}),
    )


def default_drop_order(total_blocks: int, published: Sequence[int] = ()) -> list[int]:
    """What is published comes first. The rest is a guess, to be replaced by a measurement on the model: blocks near two
    thirds of the depth are dropped first, the first and the last block never.
    """
    rest = [block for block in range(1, total_blocks - 1) if block not in published]
    return [*published, *sorted(rest, key=lambda block: abs(block - 2 * total_blocks / 3))]


def full_top_k(adapter: ModelAdapter) -> int:
    """Experts per token; 0 for a dense model, which has no top-k knob."""
    if len(dense_blocks(adapter)) == len(adapter.blocks):
        return 0
    return int(adapter.text_config.num_experts_per_tok)


def dense_blocks(adapter: ModelAdapter) -> tuple[int, ...]:
    """Indices of the blocks without experts."""
    return tuple(index for index, block in enumerate(adapter.blocks) if not hasattr(block.mlp, "experts"))


def _mark_renormalizing(blocks: nn.ModuleList) -> None:
    """Some routers divide by the sum of the chosen weights. A smaller top-k must then do the same."""
    for block in blocks:
        mlp: Any = block.mlp
        if hasattr(mlp, "experts"):
            mlp.experts.groupwise_renormalize = _renormalizes(mlp.gate)


@torch.no_grad()
def _renormalizes(gate: Any) -> bool:
    """By the router's setting; a router without one is tried on a token that prefers no expert."""
    if hasattr(gate, "norm_topk_prob"):
        return bool(gate.norm_topk_prob)
    _, weights, _ = gate(torch.zeros_like(gate.weight[:1]))
    return abs(float(weights.float().sum()) - 1) < 1e-2
