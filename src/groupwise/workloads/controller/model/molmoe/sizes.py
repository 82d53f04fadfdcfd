"""MolmoE's sizes, from the published config.json, and the names and shapes of its tensors. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from groupwise.core.errors import UserError

CROP_SIDE, PATCH_SIDE, POOL_SIDE = 336, 14, 2
"""Pixels of a crop, pixels of a patch, and patches that are pooled into one feature, all in each direction."""
OVERLAP_PATCHES = 4
"""Patches at each edge of a crop that a neighbor shows, too."""
IMAGE_TOKENS = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<|image|>")
"""Their ids follow the vocabulary in this order; the last one never reaches the model."""
END_OF_TEXT = "<|endoftext|>"
POOLED = CROP_SIDE // PATCH_SIDE // POOL_SIDE
"""Features of a crop in each direction."""
POOLED_OVERLAP = OVERLAP_PATCHES // POOL_SIDE
POOLED_WINDOW = POOLED - 2 * POOLED_OVERLAP
"""Features from one tile to the next."""
PUBLISHED_DROP_ORDER = (4, 13, 10, 2)
"""Blocks of MolmoE-1B that it misses least, as others have measured and published it."""

PUBLISHED_FIELDS: dict[str, Any] = {
    "activation_type": "swiglu",
    "alibi": False,
    "attention_layer_norm": True,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "crop_mode": "overlap-and-resize-c2",
    "final_logit_softcapping": None,
    "image_padding_embed": "pad_and_partial_pad",
    "image_pooling_2d": "attention-meanq",
    "image_pooling_h": POOL_SIDE,
    "image_pooling_w": POOL_SIDE,
    "image_projector": "mlp",
    "include_bias": False,
    "layer_norm_type": "rms",
    "norm_after": False,
    "normalize_input_embeds": False,
    "overlap_margins": [OVERLAP_PATCHES, OVERLAP_PATCHES],
    "qkv_bias": False,
    "rope": True,
    "rope_impl": "llama",
    "scale_logits": False,
    "use_cls_feature": False,
    "use_col_tokens": True,
    "weight_tying": False,
}
"""Fields whose other values would mean another computation; a field that is absent has another default."""
PUBLISHED_VISION_FIELDS: dict[str, Any] = {
    "image_default_input_size": [CROP_SIDE, CROP_SIDE],
    "image_mlp_activations": "quick_gelu",
    "image_model_type": "openai",
    "image_patch_size": PATCH_SIDE,
}
_NUMBERS = ("d_model", "n_layers", "n_heads", "moe_num_experts", "moe_top_k", "vocab_size", "embedding_size")
_VISION_NUMBERS = ("image_emb_dim", "image_num_layers", "image_num_heads", "image_mlp_dim")


@dataclass(frozen=True)
class VisionSizes:
    """The vision tower, CLIP's."""

    width: int
    blocks: int
    """As stored. Those after the last feature block are not loaded."""
    heads: int
    ffn_dim: int
    norm_eps: float
    feature_blocks: tuple[int, ...]
    """Blocks whose outputs are joined into the features, in this order."""

    @property
    def blocks_run(self) -> int:
        return max(self.feature_blocks) + 1

    @property
    def feature_width(self) -> int:
        return self.width * len(self.feature_blocks)


@dataclass(frozen=True)
class MolmoeSizes:
    width: int
    blocks: int
    heads: int
    experts: int
    top_k: int
    expert_width: int
    """Of each expert, and of the image projector."""
    vocabulary: int
    """Ids of text. Those of the image tokens follow."""
    head_rows: int
    """Logits: text, image tokens and spare ones."""
    added_rows: int
    """Rows of the embedding after those that have logits."""
    norm_eps: float
    rope_theta: float
    max_tokens: int
    vision: VisionSizes

    @property
    def embedding_rows(self) -> int:
        return self.head_rows + self.added_rows

    @property
    def image_token_ids(self) -> dict[str, int]:
        return {name: self.vocabulary + index for index, name in enumerate(IMAGE_TOKENS)}

    def parameters_by_part(self) -> dict[str, int]:
        """Of what is loaded: all tensors but the vision blocks that nothing reads."""
        counts = dict.fromkeys(("experts", "attention and routers", "embeddings and head", "vision tower"), 0)
        counts["connector"] = 0
        for name, shape in tensor_shapes(self).items():
            if vision_block(name) < self.vision.blocks_run:
                counts[_part(name)] += prod(shape)
        return counts


def feature_grid(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of features that so many tiles show together."""
    return POOLED_WINDOW * rows + 2 * POOLED_OVERLAP, POOLED_WINDOW * columns + 2 * POOLED_OVERLAP


def image_token_count(rows: int, columns: int) -> int:
    """Start, end and a token after each row, for the overview and for all tiles together."""
    return sum(2 + height * (width + 1) for height, width in ((POOLED, POOLED), feature_grid(rows, columns)))


def is_molmo(content: Mapping[str, Any]) -> bool:
    """Whether a config.json is of the Molmo family; the dense ones have the same model_type."""
    return content.get("model_type") == "molmo"


def read_sizes(content: Mapping[str, Any], source: str) -> MolmoeSizes:
    """From the content of config.json; `source` names it in error messages. What is not MolmoE is refused."""
    _check_experts(content, source)
    vision = content.get("vision_backbone")
    if not isinstance(vision, Mapping):
        raise UserError(f"{source} has no vision_backbone: MolmoE's config.json describes its vision tower there.")
    _check_published(content, PUBLISHED_FIELDS, source)
    _check_published(vision, PUBLISHED_VISION_FIELDS, f"vision_backbone of {source}")
    _check_numbers(content, _NUMBERS, source)
    _check_numbers(vision, _VISION_NUMBERS, f"vision_backbone of {source}")
    width, heads = content["d_model"], content["n_heads"]
    if content.get("n_kv_heads") not in (None, heads) or content.get("head_dim") not in (None, width // heads):
        raise UserError(
            f"{source} has n_kv_heads {content.get('n_kv_heads')} and head_dim {content.get('head_dim')}: MolmoE has as"
            f" many key heads as query heads ({heads}), which share d_model {width}. Take the published folder."
        )
    return MolmoeSizes(
        width=width,
        blocks=content["n_layers"],
        heads=heads,
        experts=content["moe_num_experts"],
        top_k=content["moe_top_k"],
        expert_width=(content.get("mlp_hidden_size") or content.get("mlp_ratio", 0) * width) // 2,
        vocabulary=content["vocab_size"],
        head_rows=content["embedding_size"],
        added_rows=content.get("additional_vocab_size") or 0,
        norm_eps=float(content.get("layer_norm_eps") or 1e-5),
        rope_theta=float(content.get("rope_theta") or 10_000),
        max_tokens=int(content.get("max_sequence_length") or content.get("max_position_embeddings") or 4096),
        vision=_vision_sizes(content, vision, source),
    )


def _vision_sizes(content: Mapping[str, Any], vision: Mapping[str, Any], source: str) -> VisionSizes:
    blocks, layers = vision["image_num_layers"], content.get("vit_layers")
    if not isinstance(layers, list) or not layers or not all(-blocks <= layer < blocks for layer in layers):
        raise UserError(
            f"{source} has vit_layers {layers}: it must list blocks of the vision tower, which has {blocks}, such as"
            " [-2, -9]."
        )
    return VisionSizes(
        width=vision["image_emb_dim"],
        blocks=blocks,
        heads=vision["image_num_heads"],
        ffn_dim=vision["image_mlp_dim"],
        norm_eps=float(vision.get("image_norm_eps") or 1e-5),
        feature_blocks=tuple(layer % blocks for layer in layers),
    )


def _check_experts(content: Mapping[str, Any], source: str) -> None:
    block_type = content.get("block_type")
    if block_type is None and not content.get("moe_num_experts"):
        raise UserError(
            f"{source} is of a dense Molmo, which has no experts: it shares model_type 'molmo' with MolmoE, but neither"
            " its fields nor its tensors. Name a folder of MolmoE-1B."
        )
    if block_type != "moe":
        raise UserError(
            f"{source} has block_type {block_type!r}: only 'moe', that of MolmoE, can be loaded. Name a folder of"
            " MolmoE-1B."
        )


def _check_published(content: Mapping[str, Any], published: Mapping[str, Any], source: str) -> None:
    for name, value in published.items():
        if content.get(name, "absent") != value:
            raise UserError(
                f"{name} is {content.get(name, 'absent')!r} in {source}: MolmoE as published has {value!r}, and its"
                " answers with another value could not be checked. Take the published config.json."
            )


def _check_numbers(content: Mapping[str, Any], names: tuple[str, ...], source: str) -> None:
    for name in names:
        value = content.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name} is {value!r} in {source}: it must be a whole number above 0.")


def tensor_shapes(sizes: MolmoeSizes) -> dict[str, tuple[int, ...]]:
    """The name and shape of each tensor in the published files."""
    text, width = "model.transformer", sizes.width
    shapes: dict[str, tuple[int, ...]] = {
        f"{text}.wte.embedding": (sizes.head_rows, width),
        f"{text}.wte.new_embedding": (sizes.added_rows, width),
    }
    for block in range(sizes.blocks):
        shapes.update(_text_block(f"{text}.blocks.{block}", sizes))
    shapes |= {f"{text}.ln_f.weight": (width,), "lm_head.weight": (sizes.head_rows, width)}
    shapes.update(_vision_tensors("model.vision_backbone.image_vit", sizes.vision))
    shapes.update(_connector_tensors("model.vision_backbone", sizes))
    return shapes


def _text_block(prefix: str, sizes: MolmoeSizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner = sizes.width, sizes.expert_width
    for norm in ("attn.attn_norm", "attn.q_norm", "attn.k_norm", "mlp.ff_norm"):
        yield f"{prefix}.{norm}.weight", (width,)
    yield f"{prefix}.attn.att_proj.weight", (3 * width, width)
    yield f"{prefix}.attn.attn_out.weight", (width, width)
    yield f"{prefix}.mlp.gate.weight", (sizes.experts, width)
    for expert in range(sizes.experts):
        for part, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
            yield f"{prefix}.mlp.experts.{expert}.{part}_proj.weight", shape


def _vision_tensors(prefix: str, vision: VisionSizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner = vision.width, vision.ffn_dim
    yield f"{prefix}.class_embedding", (width,)
    yield f"{prefix}.positional_embedding", (1 + (CROP_SIDE // PATCH_SIDE) ** 2, width)
    yield f"{prefix}.patch_embedding.weight", (width, 3 * PATCH_SIDE**2)
    yield from _with_bias(f"{prefix}.pre_ln", (width,))
    for block in range(vision.blocks):
        inside = f"{prefix}.transformer.resblocks.{block}"
        for name in ("wq", "wk", "wv", "wo"):
            yield from _with_bias(f"{inside}.attention.{name}", (width, width))
        yield from _with_bias(f"{inside}.feed_forward.w1", (inner, width))
        yield from _with_bias(f"{inside}.feed_forward.w2", (width, inner))
        yield from _with_bias(f"{inside}.attention_norm", (width,))
        yield from _with_bias(f"{inside}.ffn_norm", (width,))


def _connector_tensors(prefix: str, sizes: MolmoeSizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    pooled, joined, inner = sizes.vision.width, sizes.vision.feature_width, sizes.expert_width
    for name in ("wq", "wk", "wv"):
        yield from _with_bias(f"{prefix}.image_pooling_2d.{name}", (pooled, joined))
    yield from _with_bias(f"{prefix}.image_pooling_2d.wo", (pooled, pooled))
    yield f"{prefix}.image_projector.w1.weight", (inner, pooled)
    yield f"{prefix}.image_projector.w2.weight", (sizes.width, inner)
    yield f"{prefix}.image_projector.w3.weight", (inner, pooled)
    yield f"{prefix}.pad_embed", (2, joined)


def _with_bias(name: str, weight: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", weight
    yield f"{name}.bias", weight[:1]


def vision_block(name: str) -> int:
    """The vision block that a published tensor belongs to; -1 for a tensor of none."""
    _, found, rest = name.partition(".resblocks.")
    return int(rest.split(".")[0]) if found else -1


def _part(name: str) -> str:
    if ".image_vit." in name:
        return "vision tower"
    if ".vision_backbone." in name:
        return "connector"
    if ".experts." in name:
        return "experts"
    return "attention and routers" if ".blocks." in name or ".ln_f." in name else "embeddings and head"
