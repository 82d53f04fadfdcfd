"""Attention with its log-sum-exp, so that attention over two sets of keys can be merged exactly; and the attention
function that transformers' layers call, which leaves the choice of keys to an `AttentionLayout`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

ATTENTION_NAME = "groupwise_shared_prefix"

Queries = Float[Tensor, "batch heads queries width"]
Keys = Float[Tensor, "batch key_heads keys width"]
LogSumExp = Float[Tensor, "batch heads queries"]
KVByLayer = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of each layer, by the layer's index."""

Inputs = tuple[Queries, Keys, Keys]
"""Query, key and value. With fewer key heads than heads, consecutive heads share a key head."""

_SCORES_PER_CHUNK = 1 << 24
"""Attention scores that matrix products hold at a time: 64 MiB in float32, a few times over."""


class Scoring(NamedTuple):
    """How queries score keys."""

    scale: float
    causal: bool = False
    bias: Tensor | None = None
    """Added to the scores, [batch or 1, 1, 1, keys]: minus infinity hides a key."""


class AttentionKernel(Protocol):
    """Attention that returns its log-sum-exp, and its gradient over one of several sets of keys."""

    @property
    def name(self) -> str: ...

    @property
    def takes_bias(self) -> bool: ...

    @property
    def batches_prompts(self) -> bool:
        """Whether a call for several prompts is worth the copies that it takes."""
        ...

    def forward(self, inputs: Inputs, scoring: Scoring) -> tuple[Queries, LogSumExp, Any]:
        """Output, log-sum-exp, and what else `backward` needs."""
        ...

    def backward(
        self, grad: Queries, inputs: Inputs, merged: tuple[Queries, LogSumExp], saved: Any, scoring: Scoring
    ) -> Inputs:
        """Gradients of query, key and value of one set of keys, from the gradient of the merged output.

        It is the gradient of attention with the *merged* output and log-sum-exp: probabilities are exp(score - lse).
        """
        ...


@dataclass(frozen=True)
class FusedKernel:
    """An operation of torch that returns its log-sum-exp and has a backward, on devices that have a kernel for it.

    Torch's own context parallel merges their outputs by log-sum-exp and calls their backward with the merged ones.
    Arguments go by the names in the operations' schemas.
    """

    name: str
    operation: str
    takes_bias: bool = False
    batches_prompts: bool = True
    shares_key_heads: bool = False
    """Takes fewer key heads than heads; else keys and values are repeated for each head."""
    lse_needs_gradient: bool = False
    """XPU's computes the log-sum-exp only for inputs that require a gradient."""
    width_multiple: int = 1
    """Head widths are padded with zeros to a multiple of it."""

    def is_on(self, device: torch.device) -> bool:
        """Whether torch's dispatcher has a kernel of its own for this type of device."""
        key = torch._C._dispatch_key_for_device(device.type)
        names = self.operation, f"{self.operation}_backward"
        return all(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key) for name in names)

    def forward(self, inputs: Inputs, scoring: Scoring) -> tuple[Queries, LogSumExp, Any]:
        call = _call_requiring_gradient if self.lse_needs_gradient else _call
        out, lse, *others = call(self.operation, _arguments(self._adapt(inputs), scoring))
        kept = {name: others[index] for name, index in _kept_results(self.operation)}
        queries, width = inputs[0].shape[2:]
        unpadded = lse if lse.shape[2:] == (queries,) else lse.flatten(2)[..., :queries]
        return _narrow(out, width), unpadded, (lse.shape, kept)

    def backward(
        self, grad: Queries, inputs: Inputs, merged: tuple[Queries, LogSumExp], saved: Any, scoring: Scoring
    ) -> Inputs:
        (out, lse), (lse_shape, kept) = merged, saved
        padding = math.prod(lse_shape[2:]) - lse.shape[2]  # with it, exp(score - lse) is zero
        lse = functional.pad(lse, (0, padding), value=torch.inf).contiguous().view(lse_shape)
        grad, out = self._pad_width(grad), self._pad_width(out)
        arguments = _arguments(self._adapt(inputs), scoring)
        arguments |= {"grad_out": grad, "grad_out_": grad, "out": out, "logsumexp": lse, **kept}
        grads = _call(f"{self.operation}_backward", arguments)
        grad_query, grad_key, grad_value = (_narrow(each, inputs[0].shape[-1]) for each in grads[:3])
        if self.shares_key_heads or inputs[0].shape[1] == inputs[1].shape[1]:
            return grad_query, grad_key, grad_value
        exact, by_key_head = _exact(grad_key), (inputs[1].shape[1], -1)
        grad_key, grad_value = (each.unflatten(1, by_key_head).sum(2, dtype=exact) for each in (grad_key, grad_value))
        return grad_query, grad_key, grad_value

    def _adapt(self, inputs: Inputs) -> Inputs:
        query, key, value = inputs
        shared_by = query.shape[1] // key.shape[1]
        if shared_by > 1 and not self.shares_key_heads:
            key, value = (each.repeat_interleave(shared_by, 1) for each in (key, value))
        return self._pad_width(query), self._pad_width(key), self._pad_width(value)

    def _pad_width(self, values: Queries) -> Queries:
        """In memory they stay [batch, tokens, heads, width]: the efficient backward takes that for granted."""
        missing = -values.shape[-1] % self.width_multiple
        return functional.pad(values.transpose(1, 2), (0, missing)).transpose(1, 2) if missing else values


_RENAMED = {"rng_state": "philox_seed", "unused": "philox_offset"}
"""Results of the forward that its backward calls otherwise."""


@cache
def _signature(operation: str) -> tuple[Any, tuple[str, ...]]:
    """The operation, and the names of its arguments."""
    found = getattr(torch.ops.aten, operation).default
    return found, tuple(argument.name for argument in found._schema.arguments)


@cache
def _kept_results(operation: str) -> tuple[tuple[str, int], ...]:
    """Results after the first two that are arguments of the backward, by their names there."""
    names = [_RENAMED.get(result.name, result.name) for result in _signature(operation)[0]._schema.returns[2:]]
    wanted = _signature(f"{operation}_backward")[1]
    return tuple((name, index) for index, name in enumerate(names) if name in wanted)


def _arguments(inputs: Inputs, scoring: Scoring) -> dict[str, Any]:
    """All that any of the operations takes, by name."""
    (query, key, value), (scale, causal, bias) = inputs, scoring
    bias = bias if bias is None else bias.to(query.dtype)
    return {
        "query": query,
        "key": key,
        "value": value,
        "scale": scale,
        "is_causal": causal,
        "attn_bias": bias,
        "attn_mask": bias,
        "grad_input_mask": [True, True, True, False],
        "dropout_p": 0.0,
        "compute_log_sumexp": True,
    }


def _narrow(values: Queries, width: int) -> Queries:
    return values if values.shape[-1] == width else values[..., :width]


def _call(operation: str, given: dict[str, Any]) -> tuple[Any, ...]:
    found, names = _signature(operation)
    results: tuple[Any, ...] = found(**{name: given[name] for name in names if name in given})
    return results


def _call_requiring_gradient(operation: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """As if the query required a gradient; none is recorded."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return _call(operation, given | {"query": given["query"].detach().requires_grad_()})


FUSED_KERNELS = (
    FusedKernel(
        "flash-cpu",
        "_scaled_dot_product_flash_attention_for_cpu",
        takes_bias=True,
        batches_prompts=False,
        shares_key_heads=True,
    ),
    FusedKernel(
        "overrideable",
        "_scaled_dot_product_fused_attention_overrideable",
        takes_bias=True,
        shares_key_heads=True,
        lse_needs_gradient=True,
    ),
    FusedKernel("overrideable-plain", "_scaled_dot_product_fused_attention_overrideable", lse_needs_gradient=True),
    FusedKernel("flash", "_scaled_dot_product_flash_attention", shares_key_heads=True, width_multiple=8),
    FusedKernel("efficient", "_scaled_dot_product_efficient_attention", width_multiple=8),
)
"""In the order in which they are tried. Plugins and XPU implement the overrideable one, each with limits of its own."""


@dataclass(frozen=True)
class Products:
    """Matrix products, on any device, in float32 at least."""

    name: str = "products"
    takes_bias: bool = True
    batches_prompts: bool = True

    def forward(self, inputs: Inputs, scoring: Scoring) -> tuple[Queries, LogSumExp, Any]:
        (query, key, value), (scale, causal, bias) = inputs, scoring
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
        return out.view(query.shape), lse.view(query.shape[:-1]), None

    def backward(
        self, grad: Queries, inputs: Inputs, merged: tuple[Queries, LogSumExp], saved: Any, scoring: Scoring
    ) -> Inputs:
        """With S = scale Q K', P = exp(S - lse), O the merged output and dO its gradient:
        dV = P' dO, dS = P (dO V' - rowsum(dO O)), dQ = scale dS K, dK = scale dS' Q.
        """
        (query, key, value), (scale, causal, bias) = inputs, scoring
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
        return grad_query.view(query.shape), grad_key, grad_value


PRODUCTS = Products()


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
