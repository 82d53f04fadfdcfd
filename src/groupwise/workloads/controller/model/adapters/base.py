"""What goes into an adapter and what comes out of it, and the text side that all families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int64
from PIL.Image import Image
from torch import Tensor, nn

from groupwise.workloads.controller.model.images import ImageNormalization
from groupwise.workloads.controller.model.knobs import KnobOptions


@dataclass(frozen=True)
class Sample:
    """An image, cut or resized for every tier, and a question about it."""

    name: str
    """Tells samples apart: made from the content."""
    crops: Mapping[str, Float[Tensor, "crops channels height width"]]
    """For every tier, what the vision tower sees. LLaVA: crops of one size, the overview first and the same in all
    tiers. Qwen: one image, whose height and width are the tier's."""
    question: tuple[int, ...]
    """Token ids, after the image."""
    before: tuple[int, ...] = ()
    """Token ids in front of the image."""


@dataclass(frozen=True)
class Prompt:
    """One (sample, tier) as the first block takes it."""

    states: Float[Tensor, "tokens width"]
    places: Int64[Tensor, "axes tokens"]
    """Rotary positions: one axis, or three for time, height and width."""
    next_place: int
    """Where the answer goes on, on every axis."""
    image_start: int = 0
    """The first token of the image."""
    deepstack: Sequence[Float[Tensor, "image width"]] = ()
    """Added to the image's tokens after block 0, 1, ..., also where that block itself does not run."""

    def after_block(self, block: int, states: Float[Tensor, "more width"]) -> Float[Tensor, "more width"]:
        """States of this prompt (and of tokens after it) with what belongs behind this block."""
        if block >= len(self.deepstack):
            return states
        added = self.deepstack[block].to(states)
        states = states.clone()
        states[self.image_start : self.image_start + len(added)] += added
        return states


@dataclass(frozen=True)
class Encoded:
    """Prompts, and what went through the vision tower for them."""

    prompts: list[Prompt]
    crops: int
    patches: int = 0
    """Counted where a tier is a number of pixels."""


class ModelAdapter(Protocol):
    """A model with its vision tower, its blocks and its head laid open."""

    model: Any
    """Of transformers."""
    blocks: nn.ModuleList
    text_config: Any

    def encode(self, heads: Sequence[tuple[Sample, str]]) -> Encoded:
        """The prompt of each (sample, tier); each goes through the vision tower once."""
        ...

    def rotary(self, places: Int64[Tensor, "axes tokens"]) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines of packed tokens."""
        ...

    def embed(self, tokens: Int64[Tensor, " tokens"]) -> Float[Tensor, "tokens width"]:
        """Embeddings of text tokens."""
        ...

    def logits(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows words"]:
        """Scores of the next token."""
        ...

    def tiers(self) -> dict[str, Mapping[str, int]]:
        """The fields of KnobOptions that say what the tiers are, unless the user knows better."""
        ...

    def cut(self, image: Image, options: KnobOptions, statistics: ImageNormalization) -> dict[str, Tensor]:
        """A picture as `Sample.crops`; refused if it has not enough pixels."""
        ...

    def image_tokens(self, crops: Float[Tensor, "crops channels height width"]) -> int:
        """How many tokens one tier's crops become."""
        ...


class TextModelMixin:
    """The blocks, the embeddings and the head of a model that transformers has composed of a tower and a text model."""

    def __init__(self, model: Any):
        self.model = model
        self.text = model.model.language_model
        self.blocks: nn.ModuleList = self.text.layers
        self.text_config = model.config.text_config
        self.words: nn.Module = model.get_input_embeddings()
        _mark_renormalizing(self.blocks)

    @property
    def device(self) -> torch.device:
        return self.text.norm.weight.device

    def embed(self, tokens: Tensor) -> Tensor:
        return self.words(tokens.to(self.device))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(self.text.norm(hidden))

    def _around(self, sample: Sample, image: Float[Tensor, "image width"]) -> Float[Tensor, "tokens width"]:
        """The image's embeddings between those of the words."""
        words = self.embed(torch.tensor(sample.before + sample.question))
        before, question = words.split([len(sample.before), len(sample.question)])
        return torch.cat([before, image.to(words.dtype), question])


def full_top_k(adapter: ModelAdapter) -> int:
    """Experts per token; 0 for a dense model, which has no top-k knob."""
    if len(dense_blocks(adapter)) == len(adapter.blocks):
        return 0
    return int(adapter.text_config.num_experts_per_tok)


def dense_blocks(adapter: ModelAdapter) -> tuple[int, ...]:
    """Blocks without experts: some models mix them in, and some have no others."""
    return tuple(nth for nth, block in enumerate(adapter.blocks) if not hasattr(block.mlp, "experts"))


def _mark_renormalizing(blocks: nn.ModuleList) -> None:
    """Some routers divide by the sum of the chosen weights; a smaller top-k must then do the same."""
    for block in blocks:
        mlp: Any = block.mlp
        if hasattr(mlp, "experts"):
            mlp.experts.groupwise_renormalize = _renormalizes(mlp.gate)


@torch.no_grad()
def _renormalizes(gate: Any) -> bool:
    """As the router says; one that has no such setting is asked how it weighs a token that prefers no expert."""
    if hasattr(gate, "norm_topk_prob"):
        return bool(gate.norm_topk_prob)
    _, weights, _ = gate(torch.zeros_like(gate.weight[:1]))
    return abs(float(weights.float().sum()) - 1) < 1e-2
