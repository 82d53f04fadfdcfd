"""ModelAdapter, its inputs and outputs, the text side that all families share, and the default knobs of a model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from groupwise.core.errors import UserError
from groupwise.core.transfer import send
from groupwise.workloads.controller.config import OVERVIEW_SIDE
from groupwise.workloads.controller.model.adapters.experts import expert_module, mark_router_rules, router_of
from groupwise.workloads.controller.model.images import CropShape, ImageNormalization, LazyCrops, Sides, SourceImage
from groupwise.workloads.controller.model.knobs import KnobOptions

_LATEST_INSERTION_POSITION = 5
_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


Rotary = Any
"""Mostly cosines and sines; some blocks take complex numbers."""


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
    def rotary_layer_types(self) -> Sequence[str | None]:
        """By block, what its rotary positions depend on; None where they are the same for all blocks."""
        ...

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

    def rotary(self, position_ids: Int64[Tensor, "axes tokens"], layer_type: str | None = None) -> Rotary:
        """Rotary positions of packed tokens, as the model's blocks take them; in some models by their type."""
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

    def image_delimiters(self, tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids that belong right before and after the image, which chat templates leave to the processor."""
        ...

    def stock_logits(self, sample: Sample, tier: str, answer: Sequence[int]) -> Float[Tensor, "answered words"]:
        """What transformers' own forward says after a prompt, and after each of the answer's first tokens."""
        ...


class TextModelMixin:
    """Blocks, embeddings and head of a transformers model that is composed of a vision tower and a text model."""

    def __init__(self, model: Any):
        self.model = model
        self.text = model.model.language_model
        _check_text_model(type(model).__name__, self.text)
        self.blocks: nn.ModuleList = self.text.layers
        self.text_config = model.config.text_config
        self.embedding: Any = model.get_input_embeddings()
        self._embedding_scale: float | None = getattr(self.text, "embedding_multiplier", None)
        """Of Granite's text models, which scale what enters the first block."""
        mark_router_rules(self.blocks)

    @property
    def published_drop_order(self) -> Sequence[int]:
        return ()

    @property
    def probe_shapes(self) -> Sequence[tuple[float, float]]:
        return ((1.0, 1.0),)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def embed(self, tokens: Tensor) -> Tensor:
        return self._scale(self.embedding(send(tokens, self.device)))

    def _scale(self, states: Tensor) -> Tensor:
        return states if self._embedding_scale is None else states * self._embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(self.text.norm(hidden))

    def rotary(self, position_ids: Tensor, layer_type: str | None = None) -> Rotary:
        like = self.embedding.weight[None, :1]
        by_type = {} if layer_type is None else {"layer_type": layer_type}
        return self.text.rotary_emb(like, self._rotary_position_ids(send(position_ids, self.device)), **by_type)

    def _rotary_position_ids(self, position_ids: Tensor) -> Tensor:
        """As the rotary embedding takes them."""
        return position_ids

    @property
    def rotary_layer_types(self) -> Sequence[str | None]:
        """By block, what its rotary positions depend on; None where they are the same for all blocks."""
        if "layer_type" not in inspect.signature(self.text.rotary_emb.forward).parameters:
            return [None] * len(self.blocks)
        return list(self.text_config.layer_types)

    def embed_text(self, sample: Sample) -> Tensor:
        return self.embed(torch.tensor(sample.prefix_ids + sample.question_ids))

    def _insert_image(
        self, sample: Sample, image: Float[Tensor, "image width"], texts: Mapping[str, Tensor] | None
    ) -> Float[Tensor, "tokens width"]:
        """The image's embeddings between those of the text."""
        text = texts[sample.name] if texts and sample.name in texts else self.embed_text(sample)
        prefix, question = text.split([len(sample.prefix_ids), len(sample.question_ids)])
        return torch.cat([prefix, self._scale(image.to(text.dtype)), question])

    def image_delimiters(self, tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids that belong right before and after the image, which chat templates leave to the processor."""
        return (), ()

    def stock_logits(self, sample: Sample, tier: str, answer: Sequence[int]) -> Float[Tensor, "answered words"]:
        inputs, answered = self._stock_inputs(sample, tier, answer), len(answer) + 1
        if inputs is None:
            states = torch.cat(
                [self.encode([(sample, tier)]).prompts[0].states, self.embed(torch.tensor(answer).long())]
            )
            hidden = self.text(inputs_embeds=states[None], use_cache=False).last_hidden_state[0, -answered:]
            return self.model.lm_head(hidden).float()
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            inputs["logits_to_keep"] = answered
        logits: Tensor = self.model(**inputs, use_cache=False).logits[0]
        return logits[-answered:].float()

    def _stock_inputs(self, sample: Sample, tier: str, answer: Sequence[int]) -> dict[str, Any] | None:
        """What the whole model takes, the answer's first tokens included; None where transformers has no such model,
        so that only its text model can be compared."""
        return None

    def encode(self, inputs: Sequence[tuple[Sample, str]], texts: Mapping[str, Tensor] | None = None) -> Encoded:
        raise NotImplementedError

    def _token_ids(self, sample: Sample, image_tokens: int, answer: Sequence[int]) -> Int64[Tensor, "1 tokens"]:
        """A whole prompt with its image tokens, and what has been answered."""
        image = [self.model.config.image_token_id] * image_tokens
        ids = [*sample.prefix_ids, *image, *sample.question_ids, *answer]
        return torch.tensor([ids], device=self.device)


def _check_text_model(name: str, text: Any) -> None:
    """Refuse a text model of another kind than blocks of causal attention with rotary positions and a norm at the end.

    Short prompts would not show what is refused here, so that a comparison of answers cannot replace it.
    """
    missing = [part for part in ("layers", "rotary_emb", "norm") if not hasattr(text, part)]
    kinds = set(getattr(text.config, "layer_types", None) or ()) - _SUPPORTED_LAYER_TYPES
    rope_types = set(_rope_types(getattr(text.config, "rope_parameters", None) or {})) & _LENGTH_DEPENDENT_ROPE
    reasons = [f"it has no {part}" for part in missing]
    reasons += [f"it has blocks of the type {kind}" for kind in sorted(kinds)]
    reasons += [f"its rotary positions ({kind}) depend on the longest prompt of a batch" for kind in sorted(rope_types)]
    if reasons:
        raise UserError(
            f"{name} with the text model {text.config.model_type!r} cannot be controlled: {', '.join(reasons)}. The"
            " executor runs blocks of causal attention with rotary positions, and a norm after the last. Take a model"
            " that docs/model-families.md lists as equal."
        )


def _rope_types(parameters: Mapping[str, Any]) -> list[str]:
    """Of all blocks, or of each type of block."""
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    own = [str(parameters["rope_type"])] if "rope_type" in parameters else []
    return own + [rope_type for value in nested for rope_type in _rope_types(value)]


def image_side(vision_config: Any) -> int:
    """The height and width of what the vision tower takes; 0 where it takes any size."""
    return _first(getattr(vision_config, "image_size", 0))


def patch_side(vision_config: Any) -> int:
    return _first(vision_config.patch_size)


def _first(sides: int | Sequence[int]) -> int:
    """Some configurations name the height and the width, which are equal."""
    return sides if isinstance(sides, int) else int(sides[0])


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
        smallest_top_k=_smallest_top_k(adapter),
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
    modules = [expert_module(block) for block in adapter.blocks]
    return max((int(router_of(module).top_k) for module in modules if module is not None), default=0)


def _smallest_top_k(adapter: ModelAdapter) -> int:
    """Half of the experts per token; all of them where some router says too little to keep fewer."""
    modules = [expert_module(block) for block in adapter.blocks]
    full = full_top_k(adapter)
    has_rules = all(module is None or module.experts.groupwise_rule is not None for module in modules)
    return (full + 1) // 2 if has_rules else full


def dense_blocks(adapter: ModelAdapter) -> tuple[int, ...]:
    """Indices of the blocks without experts."""
    return tuple(index for index, block in enumerate(adapter.blocks) if expert_module(block) is None)
