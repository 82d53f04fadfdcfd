"""Sizes of a Llama-like language model, read from its `config.json`: parameters, widths, KV cache. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from groupwise.core.errors import UserError
from groupwise.core.io.files import parse_json

_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_MIXTURE_OF_EXPERTS = ("olmoe", "mixtral", "qwen3_moe")
_KNOWN = (*_DENSE, *_MIXTURE_OF_EXPERTS)
_QK_NORM: dict[str, Literal["per_head", "all_heads"]] = {
    "qwen3": "per_head",
    "qwen3_moe": "per_head",
    "olmoe": "all_heads",
}
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Architecture:
    """Llama-like: attention with (grouped) heads and a gated feed-forward part, or experts in its place."""

    model_type: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    """Inner width of the feed-forward part, or of one expert."""
    vocabulary: int
    experts: int = 0
    """0 for a dense model."""
    top_k: int = 0
    tied: bool = False
    attention_bias: bool = False
    max_positions: int | None = None

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qk_norm(self) -> Literal["per_head", "all_heads"] | None:
        """How queries and keys are normalized, if at all."""
        return _QK_NORM.get(self.model_type)

    @property
    def head_params(self) -> int:
        return self.vocabulary * self.width

    @property
    def layer_params(self) -> int:
        attention = self.width * (2 * self.query_width + 2 * self.kv_width)
        biases = self.query_width + 2 * self.kv_width if self.attention_bias else 0
        norms = 2 * self.width
        if self.qk_norm is not None:
            norms += self.query_width + self.kv_width if self.qk_norm == "all_heads" else 2 * self.head_dim
        feed_forward = 3 * self.width * self.ffn_dim
        if self.experts:
            feed_forward = self.experts * feed_forward + self.width * self.experts  # and the router
        return attention + biases + norms + feed_forward

    @property
    def parameters(self) -> int:
        """All of them, exactly."""
        return self.layers * self.layer_params + self.head_params * (1 if self.tied else 2) + self.width

    def lora_params(self, rank: int) -> int:
        """PEFT's LoRA on every linear layer but the head; the joined gate and up of experts get twice the rank."""
        attention = 2 * (self.width + self.query_width) + 2 * (self.width + self.kv_width)
        feed_forward = 3 * (self.width + self.ffn_dim)
        if self.experts:
            gate_and_up = 2 * (self.width + 2 * self.ffn_dim)
            router = self.width + self.experts
            feed_forward = self.experts * (gate_and_up + self.ffn_dim + self.width) + router
        return self.layers * rank * (attention + feed_forward)

    def kv_bytes(self, tokens: int, dtype_bytes: int) -> int:
        """Keys and values of so many tokens: 2 x layers x kv_heads x head_dim x tokens x bytes."""
        return 2 * self.layers * self.kv_width * tokens * dtype_bytes


def read_architecture(path: Path) -> Architecture:
    """From a `config.json`, or the folder of a model."""
    file = path / "config.json" if path.is_dir() else path
    return architecture(read_model_config(file), str(file))


def read_model_config(file: Path) -> dict[str, Any]:
    """The content of a model's config.json."""
    try:
        content = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a model's config.json ({error}). Check the path.") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is no model's config.json: it holds no object. Check the path.")
    return content


def architecture(content: Mapping[str, Any], source: str = "The config") -> Architecture:
    """From the content of a config.json; `source` names it in error messages."""
    model_type = str(content.get("model_type"))
    missing = [field for field in _REQUIRED if field not in content]
    if model_type not in _KNOWN or missing:
        problem = f"lacks {', '.join(missing)}" if model_type in _KNOWN else f"has model_type '{model_type}'"
        raise UserError(
            f"{source} {problem}: the plan knows {', '.join(_KNOWN)}. For a model on this machine, `groupwise plan"
            " RECIPE --trace` or `--probe` measures a real step instead."
        )
    heads, width = int(content["num_attention_heads"]), int(content["hidden_size"])
    has_experts = model_type in _MIXTURE_OF_EXPERTS
    experts = int(content.get("num_experts") or content.get("num_local_experts") or 0) if has_experts else 0
    ffn_dim = content.get("moe_intermediate_size") if experts else None
    return Architecture(
        model_type=model_type,
        width=width,
        layers=int(content["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(content.get("num_key_value_heads") or heads),
        head_dim=int(content.get("head_dim") or width // heads),
        ffn_dim=int(ffn_dim or content["intermediate_size"]),
        vocabulary=int(content["vocab_size"]),
        experts=experts,
        top_k=int(content.get("num_experts_per_tok") or 0) if experts else 0,
        tied=bool(content.get("tie_word_embeddings", False)),
        attention_bias=model_type == "qwen2" or bool(content.get("attention_bias", False)),
        max_positions=content.get("max_position_embeddings"),
    )
