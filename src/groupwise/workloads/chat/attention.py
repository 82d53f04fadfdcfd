"""How the engine's layouts reach the attention of a transformers model: as one more keyword of its forward.

Llama, Qwen3, OLMoE and the rest look their attention function up by name and hand it the keywords they do not know. So
projections, norms and rotary positions stay the model's own, and only "who sees whom" is decided here.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "groupwise_shared_prompt"


class Layout(Protocol):
    """Who stands where in a batch, and whom a token sees."""

    @property
    def predicting(self) -> Tensor | None:
        """Numbers of the tokens, counted through the batch, that something is predicted from; None for all."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[batch, heads, tokens, width] and keys of perhaps fewer heads -> [batch, tokens, heads, width]."""
        ...


def shared_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer."""
    if layout is None:
        raise RuntimeError(
            "This model belongs to a groupwise policy that shares prompts; it is sampled by generate() and scored by"
            " score(). To call it directly, set model.set_attn_implementation('sdpa') first."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return layout.attend(module.layer_idx, query, key, value, scale), None


AttentionInterface.register(NAME, shared_attention)
