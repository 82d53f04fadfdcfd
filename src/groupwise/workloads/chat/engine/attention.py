"""Attention with its log-sum-exp, so that attention over two sets of keys can be merged exactly; and the attention
function that transformers' layers call, which leaves the choice of keys to an `AttentionLayout`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface

ATTENTION_NAME = "groupwise_shared_prefix"

Queries = Float[Tensor, "batch heads queries width"]
Keys = Float[Tensor, "batch key_heads keys width"]
LogSumExp = Float[Tensor, "batch heads queries"]
KVByLayer = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of each layer, by the layer's index."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attend(
    query: Queries, key: Keys, value: Keys, *, scale: float, causal: bool = False, bias: Tensor | None = None
) -> tuple[Queries, LogSumExp]:
    """Attention and its log-sum-exp. With fewer key heads than heads, consecutive heads share a key head.

    `bias` is added to the scores (minus infinity hides a key) and broadcasts to [batch, heads, queries, keys].
    """
    if query.device.type == "cpu":
        return _flash(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
    return attention_eager(query, key, value, scale=scale, causal=causal, bias=bias)


def attend_backward(
    grad: Queries,
    query: Queries,
    key: Keys,
    value: Keys,
    merged: tuple[Queries, LogSumExp],
    *,
    scale: float,
    causal: bool,
) -> tuple[Queries, Keys, Keys]:
    """Gradients of query, key and value of one set of keys, from the gradient of the merged output (CPU).

    It is the gradient of attention with the *merged* output and log-sum-exp: probabilities are exp(score - lse).
    """
    out, lse = merged
    return _flash_backward(grad, query, key, value, out, lse, 0.0, causal, scale=scale)


def attention_eager(
    query: Queries, key: Keys, value: Keys, *, scale: float, causal: bool = False, bias: Tensor | None = None
) -> tuple[Queries, LogSumExp]:
    """`attend` by matrix products, on any device, in float32 at least."""
    heads_per_key = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(heads_per_key, 1), value.repeat_interleave(heads_per_key, 1)
    exact = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):  # autocast would round the products
        scores = (query.to(exact) * scale) @ key.to(exact).mT
        if bias is not None:
            scores = scores + bias
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        lse = scores.logsumexp(-1)
        return ((scores - lse[..., None]).exp() @ value.to(exact)).to(value.dtype), lse


def merge_by_lse(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> Tensor:
    """Attention over the union of two sets of keys, from the outputs and log-sum-exps over each.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i). Outputs have one more axis than log-sum-exps.
    """
    return torch.lerp(first, second, torch.sigmoid(second_lse - first_lse)[..., None].to(first.dtype))


class AttentionLayout(Protocol):
    """How the tokens of a batch are arranged, and which tokens each of them attends to."""

    @property
    def logit_positions(self) -> Tensor | None:
        """Indices, in the flattened batch, of the tokens whose logits are needed; None for all."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[batch, heads, tokens, width], with perhaps fewer key heads -> [batch, tokens, heads, width]."""
        ...


def layout_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    layout: AttentionLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer.

    Llama, Qwen3, OLMoE and others look it up by name and pass unknown keywords of their forward on to it. So the
    model computes projections, norms and rotary embeddings itself, and the layout only decides on the keys.
    """
    if layout is None:
        raise RuntimeError(
            "This model belongs to a groupwise policy with a shared-prefix forward; it is sampled by generate() and"
            " scored by score(). To call it directly, set model.set_attn_implementation('sdpa') first."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return layout.attend(module.layer_idx, query, key, value, scale), None


AttentionInterface.register(ATTENTION_NAME, layout_attention)
