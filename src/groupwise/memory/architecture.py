"""A language model by its `config.json` alone: how many numbers it has, and how wide everything in it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError

_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_EXPERTS = ("olmoe", "mixtral", "qwen3_moe")
KNOWN = (*_DENSE, *_EXPERTS)
_QUERY_KEY_NORM = {"qwen3": "head", "qwen3_moe": "head", "olmoe": "all"}
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Architecture:
    """Llama-like: attention with (grouped) heads and a gated feed-forward part, or experts in its place."""

    kind: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    """Width of the feed-forward part, or of one expert."""
    vocabulary: int
    experts: int = 0
    """0 for a dense model."""
    top_k: int = 0
    tied: bool = False
    attention_bias: bool = False
    longest: int | None = None

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    @property
    def normed_heads(self) -> bool:
        """Whether queries and keys are normed."""
        return self.kind in _QUERY_KEY_NORM

    @property
    def lean(self) -> bool:
        """Whether chat runs it by its own forward, which keeps less: it is for norms of each head, or of none."""
        return _QUERY_KEY_NORM.get(self.kind) != "all"

    @property
    def head_numbers(self) -> int:
        return self.vocabulary * self.width

    @property
    def layer_numbers(self) -> int:
        attention = self.width * (2 * self.query_width + 2 * self.kv_width)
        biases = self.query_width + 2 * self.kv_width if self.attention_bias else 0
        norms = 2 * self.width
        if self.kind in _QUERY_KEY_NORM:
            whole = _QUERY_KEY_NORM[self.kind] == "all"
            norms += self.query_width + self.kv_width if whole else 2 * self.head_width
        inner = 3 * self.width * self.inner
        if self.experts:
            inner = self.experts * inner + self.width * self.experts  # and the router
        return attention + biases + norms + inner

    @property
    def parameters(self) -> int:
        """All of them, exactly."""
        return self.layers * self.layer_numbers + self.head_numbers * (1 if self.tied else 2) + self.width

    def adapter_numbers(self, rank: int) -> int:
        """A LoRA adapter (PEFT's) on every layer but the head; the joined gate and up of experts get twice the rank."""
        attention = 2 * (self.width + self.query_width) + 2 * (self.width + self.kv_width)
        inner = 3 * (self.width + self.inner)
        if self.experts:
            joined = 2 * (self.width + 2 * self.inner)
            inner = self.experts * (joined + self.inner + self.width) + self.width + self.experts
        return self.layers * rank * (attention + inner)

    def kv_bytes(self, tokens: int, number_bytes: int) -> int:
        """Keys and values of so many tokens: 2 x layers x grouped heads x head width x tokens x bytes."""
        return 2 * self.layers * self.kv_width * tokens * number_bytes


def read_architecture(path: Path) -> Architecture:
    """From a `config.json`, or the folder of a model."""
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a model's config.json ({error}). Check the path.") from error
    return architecture(content, str(file))


def architecture(content: Mapping[str, Any], name: str = "The config") -> Architecture:
    kind = str(content.get("model_type"))
    missing = [field for field in _NEEDED if field not in content]
    if kind not in KNOWN or missing:
        said = f"lacks {', '.join(missing)}" if kind in KNOWN else f"has model_type '{kind}'"
        raise UserError(
            f"{name} {said}: the arithmetic knows {', '.join(KNOWN)}. For a model that is on this machine, `groupwise"
            " plan RECIPE --trace` or `--probe` follows a real step instead."
        )
    heads, width = int(content["num_attention_heads"]), int(content["hidden_size"])
    experts = int(content.get("num_experts") or content.get("num_local_experts") or 0) if kind in _EXPERTS else 0
    inner = content.get("moe_intermediate_size") if experts else None
    return Architecture(
        kind=kind,
        width=width,
        layers=int(content["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(content.get("num_key_value_heads") or heads),
        head_width=int(content.get("head_dim") or width // heads),
        inner=int(inner or content["intermediate_size"]),
        vocabulary=int(content["vocab_size"]),
        experts=experts,
        top_k=int(content.get("num_experts_per_tok") or 0) if experts else 0,
        tied=bool(content.get("tie_word_embeddings", False)),
        attention_bias=kind == "qwen2" or bool(content.get("attention_bias", False)),
        longest=content.get("max_position_embeddings"),
    )
