"""The settings of the policy and of its sampling. No torch here: `--help` answers at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from groupwise.core.errors import require, require_types


@dataclass(frozen=True)
class PolicyConfig:
    """Which language model is trained, and how."""

    model: str = ""
    """Folder of a transformers causal language model, or its name on the hub."""
    lora_rank: int | None = None
    """Rank of a LoRA adapter (PEFT), which alone is trained; None trains all weights."""
    lora_alpha: float = 32.0
    """The adapter's output is scaled by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter; empty for all but the head."""
    lora_seed: int = 0
    """Decides the adapter's first weights."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """What the model computes in. With bfloat16, weights that are trained stay in float32 and are rounded once
    for all products of a pass or a rollout; frozen ones are kept in bfloat16."""
    gradient_checkpointing: bool = False
    """Keep only the layers' inputs for the backward pass and compute the rest again: less memory, the same result."""
    reference: Literal["none", "adapter", "copy"] = "none"
    """What the KL term compares with: nothing; the model with its adapter switched off; or a frozen copy."""
    path: Literal["auto", "shared", "plain"] = "auto"
    """shared: a prompt is computed once for its whole group. plain: transformers' own forward, for families of models
    whose cache cannot be shared so. auto takes shared where it can, and says so where it cannot."""

    def __post_init__(self) -> None:
        require_types(self, "policy.")
        require(self.lora_rank is None or self.lora_rank >= 1, "policy.lora_rank", self.lora_rank, "1 or more, or None")
        require(0 < self.lora_alpha < math.inf, "policy.lora_alpha", self.lora_alpha, "above 0")
        can_switch = self.reference != "adapter" or self.lora_rank is not None
        require(can_switch, "policy.reference", self.reference, "'copy' or 'none' where policy.lora_rank is None")


@dataclass(frozen=True)
class Sampling:
    """The distribution that a token is drawn from. Training scores with the same one."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token (for evaluation only)."""
    top_k: int | None = None
    """Only the k likeliest tokens; None for all."""
    top_p: float | None = None
    """Of those, only the likeliest that together reach this probability; None for all."""
    max_new_tokens: int = 64
    """Longest completion. One that reaches it without a stop token counts as truncated."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion. They are part of it, and are trained."""

    def __post_init__(self) -> None:
        require_types(self, "sampling.")
        rules = {
            "temperature": (0 <= self.temperature < math.inf, "0 or more"),
            "top_k": (self.top_k is None or self.top_k >= 1, "1 or more, or None"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1, or None"),
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
        }
        for name, (holds, rule) in rules.items():
            require(holds, f"sampling.{name}", getattr(self, name), rule)

    @property
    def truncates(self) -> bool:
        """Whether some tokens get no chance at all."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1)
