"""What the executor needs of a model: prompts as embeddings, blocks, and a head. One small class a family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from groupwise.core.errors import UserError


@dataclass(frozen=True)
class Sample:
    """An image, cut for every tier, and a question about it."""

    name: str
    """Tells samples apart: made from the content."""
    crops: Mapping[str, Float[Tensor, "crops channels height width"]]
    """For every tier, the overview first. All tiers have the same overview."""
    question: tuple[int, ...]
    """Token ids."""


class Adapter(Protocol):
    """A model with its vision tower, its blocks and its head laid open."""

    blocks: nn.ModuleList
    text_config: Any

    def encode(self, prompts: Sequence[tuple[Sample, str]]) -> tuple[list[Float[Tensor, "tokens width"]], int]:
        """Embeddings of each (sample, tier), and how many crops went through the vision tower for them."""
        ...

    def positions(self, lengths: Sequence[int], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines of packed rows, each counted from its own start."""
        ...

    def embed(self, tokens: Int64[Tensor, " tokens"]) -> Float[Tensor, "tokens width"]:
        """Embeddings of text tokens."""
        ...

    def logits(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows words"]:
        """Scores of the next token."""
        ...


class LlavaAdapter:
    """`LlavaForConditionalGeneration`: a vision tower, a projector and any text model with rotary positions."""

    def __init__(self, model: Any):
        self.model = model
        self.text = model.model.language_model
        self.blocks = self.text.layers
        self.text_config = model.config.text_config
        _mark_renormalising(self.blocks)

    def encode(self, prompts: Sequence[tuple[Sample, str]]) -> tuple[list[Tensor], int]:
        overviews = {sample.name: sample.crops[tier][:1] for sample, tier in prompts}
        details = {(sample.name, tier): sample.crops[tier][1:] for sample, tier in prompts}
        pixels = torch.cat([*overviews.values(), *details.values()])
        features = self.model.get_image_features(pixel_values=pixels, **self._feature_choice).pooler_output
        features = features if isinstance(features, Tensor) else torch.stack(list(features))
        counts = [len(crops) for crops in (*overviews.values(), *details.values())]
        parts = dict(zip([*overviews, *details], features.split(counts), strict=True))
        encoded = []
        for sample, tier in prompts:
            image = torch.cat([parts[sample.name], parts[sample.name, tier]]).flatten(0, 1)
            question = self.embed(torch.tensor(sample.question))
            encoded.append(torch.cat([image.to(question.dtype), question]))
        return encoded, len(pixels)

    @property
    def _feature_choice(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "vision_feature_layer": config.vision_feature_layer,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
        }

    def positions(self, lengths: Sequence[int], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        places = torch.cat([torch.arange(start, start + length) for length, start in zip(lengths, starts, strict=True)])
        weight = self.text.norm.weight
        cosines, sines = self.text.rotary_emb(weight[None, None], places[None].to(weight.device))
        return cosines, sines

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(tokens.to(self.text.norm.weight.device))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(self.text.norm(hidden))


def adapt(model: Any) -> Adapter:
    """The adapter of a model's family; an unknown family is refused by name."""
    name = type(model).__name__
    if name == "LlavaForConditionalGeneration":
        return LlavaAdapter(model)
    raise UserError(
        f"{name} cannot be steered by knobs yet: there is an adapter for LlavaForConditionalGeneration. Write one as in"
        " groupwise/workloads/controller/adapter.py."
    )


def full_top_k(adapter: Adapter) -> int:
    """Experts per token; refused for a model that has none."""
    top_k = getattr(adapter.text_config, "num_experts_per_tok", None)
    if not top_k:
        raise UserError(
            f"{type(adapter.text_config).__name__} is a dense model: it has no experts, so it cannot offer the top-k"
            " knob. Offer tier and blocks only."
        )
    return int(top_k)


def _mark_renormalising(blocks: nn.ModuleList) -> None:
    """Some routers divide by the sum of the chosen weights; a smaller top-k must then do the same."""
    for block in blocks:
        gate = getattr(block.mlp, "gate", None)
        experts = getattr(block.mlp, "experts", None)
        if gate is not None and experts is not None:
            experts.groupwise_renormalise = bool(getattr(gate, "norm_topk_prob", False))
