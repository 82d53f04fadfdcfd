"""Attention with its log-sum-exp, so that attention over two sets of keys can be merged exactly; and the attention
function that transformers' layers call, which leaves the choice of keys to an `AttentionLayout`.
"""

from __future__ import annotations

from collections.abc import Iterator
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
_SCORES_PER_CHUNK = 1 << 24
"""Attention scores that matrix products hold at a time: 64 MiB in float32, a few times over."""


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
    """`attend` by matrix products, on any device, in float32 at least. `bias` is the same for all heads and queries."""
    exact, folded = _exact(query), _fold(query, key)
    out, lse = folded.new_empty(folded.shape), folded.new_empty(folded.shape[:-1], dtype=exact)
    with torch.autocast(query.device.type, enabled=False):  # autocast would round the products
        for rows, queries, keys in _chunks(folded, key, causal=causal):
            part = folded[rows, :, :, queries]
            scores = _scores(part, key[rows, :, keys], scale, queries if causal else None, _rows(bias, rows))
            part_lse = scores.logsumexp(-1)
            weights = scores.sub_(part_lse[..., None]).exp_()
            out[rows, :, :, queries] = _weighted(weights, value[rows, :, keys].to(exact)).to(out.dtype)
            lse[rows, :, :, queries] = part_lse
    return out.view(query.shape), lse.view(query.shape[:-1])


def attention_eager_backward(  # noqa: PLR0913
    grad: Queries,
    query: Queries,
    key: Keys,
    value: Keys,
    merged: tuple[Queries, LogSumExp],
    *,
    scale: float,
    causal: bool,
    bias: Tensor | None = None,
) -> tuple[Queries, Keys, Keys]:
    """`attend_backward` by matrix products, on any device, in float32 at least.

    With S = scale Q K', P = exp(S - lse), O the merged output and dO its gradient:
    dV = P' dO, dS = P (dO V' - rowsum(dO O)), dQ = scale dS K, dK = scale dS' Q.
    """
    exact = _exact(query)
    folded, folded_grad, out = (_fold(tensor, key) for tensor in (query, grad, merged[0]))
    lse = merged[1].reshape(folded.shape[:-1])
    grad_query = folded.new_empty(folded.shape, dtype=exact)
    grad_key, grad_value = torch.zeros_like(key, dtype=exact), torch.zeros_like(value, dtype=exact)
    with torch.autocast(query.device.type, enabled=False):
        for rows, queries, keys in _chunks(folded, key, causal=causal):
            part, part_grad = (tensor[rows, :, :, queries].to(exact) for tensor in (folded, folded_grad))
            part_key, part_value = key[rows, :, keys].to(exact), value[rows, :, keys].to(exact)
            scores = _scores(part, part_key, scale, queries if causal else None, _rows(bias, rows))
            weights = scores.sub_(lse[rows, :, :, queries, None]).exp_()
            grad_value[rows, :, keys] += _transposed(weights, part_grad)
            shared = torch.linalg.vecdot(part_grad, out[rows, :, :, queries].to(exact))[..., None]
            grad_scores = weights.mul_(_weighted(part_grad, part_value.mT).sub_(shared)).mul_(scale)
            grad_query[rows, :, :, queries] = _weighted(grad_scores, part_key)
            grad_key[rows, :, keys] += _transposed(grad_scores, part)
    return grad_query.view(query.shape).to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _exact(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _fold(values: Queries, key: Keys) -> Tensor:
    """[batch, key heads, heads of each, queries, width]: heads that share a key head beside each other."""
    return values.unflatten(1, (key.shape[1], -1)).contiguous()


def _chunks(folded: Tensor, key: Keys, *, causal: bool) -> Iterator[tuple[slice, slice, slice]]:
    """Rows of the batch, queries of each, and the keys that these see, with at most `_SCORES_PER_CHUNK` scores."""
    batch, heads, queries, keys = folded.shape[0], folded.shape[1] * folded.shape[2], folded.shape[3], key.shape[2]
    query_step = max(1, min(queries, _SCORES_PER_CHUNK // (heads * keys or 1)))
    row_step = max(1, _SCORES_PER_CHUNK // (heads * keys * query_step or 1))
    for row in range(0, batch, row_step):
        for start in range(0, queries, query_step):
            stop = min(start + query_step, queries)
            yield slice(row, min(row + row_step, batch)), slice(start, stop), slice(0, stop if causal else keys)


def _rows(bias: Tensor | None, rows: slice) -> Tensor | None:
    return bias if bias is None or bias.shape[0] == 1 else bias[rows]


def _scores(query: Tensor, key: Keys, scale: float, causal: slice | None, bias: Tensor | None) -> Tensor:
    """[batch, key heads, heads of each, queries, keys], with minus infinity for keys that a query does not see."""
    exact = _exact(query)
    scores = _weighted(query.to(exact) * scale, key.to(exact).mT)
    if bias is not None:
        scores += bias[:, :, None].to(exact)
    if causal is not None:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(causal.start + 1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """[batch, key heads, heads of each, queries, n] x [batch, key heads, n, m]: one product for each key head."""
    return (weights.flatten(2, 3) @ values).unflatten(2, weights.shape[2:4])


def _transposed(weights: Tensor, values: Tensor) -> Tensor:
    """Sum over queries and over the heads that share a key head: [batch, key heads, keys, width]."""
    return weights.flatten(2, 3).mT @ values.flatten(2, 3)


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
