"""How the engine's layouts reach the attention of a transformers model: as one more keyword of its forward.

Llama, Qwen3, OLMoE and the rest look their attention function up by name and hand it the keywords they do not know. So
projections, norms and rotary positions stay the model's own, and only "who sees whom" is decided here.
Attention that also tells its log-sum-exp, so that parts over different keys can be merged exactly.

Softmax over two sets of keys: out = sum_i exp(lse_i - lse) out_i, with lse = log sum_i exp(lse_i). The gradient of each
part is that of attention with the *merged* output and log-sum-exp, since its probabilities are exp(score - lse).
On the CPU these are torch's own flash kernels; elsewhere plain products, which any device has.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface

ATTENTION_NAME = "groupwise_shared_prompt"


class Layout(Protocol):
    """Who stands where in a batch, and whom a token sees."""

    @property
    def predicting(self) -> Tensor | None:
        """Numbers of the tokens, counted through the batch, that something is predicted from; None for all."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[batch, heads, tokens, width] and keys of perhaps fewer heads -> [batch, tokens, heads, width]."""
        ...


def layout_attention(
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


AttentionInterface.register(ATTENTION_NAME, layout_attention)


Queries = Float[Tensor, "batch heads queries width"]
Keys = Float[Tensor, "batch key_heads keys width"]
LogSumExp = Float[Tensor, "batch heads queries"]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attend(
    query: Queries, key: Keys, value: Keys, *, scale: float, causal: bool = False, bias: Tensor | None = None
) -> tuple[Queries, LogSumExp]:
    """Attention and its log-sum-exp. Fewer key heads than heads: each serves heads / key_heads neighbours.

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
    """Gradients of query, key and value of one part, from the gradient of the merged output (CPU)."""
    out, lse = merged
    return _flash_backward(grad, query, key, value, out, lse, 0.0, causal, scale=scale)


def attention_eager(
    query: Queries, key: Keys, value: Keys, *, scale: float, causal: bool = False, bias: Tensor | None = None
) -> tuple[Queries, LogSumExp]:
    """The same by plain products, in float32 at least."""
    served = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(served, 1), value.repeat_interleave(served, 1)
    exact = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):  # it would round the products
        scores = (query.to(exact) * scale) @ key.to(exact).mT
        if bias is not None:
            scores = scores + bias
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        lse = scores.logsumexp(-1)
        return ((scores - lse[..., None]).exp() @ value.to(exact)).to(value.dtype), lse


def merge_by_lse(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> Tensor:
    """Attention over two sets of keys, from attention over each; outputs have one axis more than log-sum-exps."""
    return torch.lerp(first, second, torch.sigmoid(second_lse - first_lse)[..., None].to(first.dtype))
