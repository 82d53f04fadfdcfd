"""Attention over a packed sequence, without a mask of its size: by parts on the CPU, by blocks elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.workloads.chat.kernels import attend, attend_backward, merge

if TYPE_CHECKING:
    from groupwise.workloads.chat.packed import Packed

ByToken = Float[Tensor, "tokens heads width"]
ByHead = Float[Tensor, "1 heads tokens width"]


def attend_by_parts(query: ByHead, key: ByHead, value: ByHead, packed: Packed, scale: float) -> Tensor:
    """Prompts causally, completions to their prompt, completions within themselves: merged by log-sum-exp."""
    out: Tensor = _Parts.apply(*(each[0].transpose(0, 1) for each in (query, key, value)), packed, scale)
    return out[None]


def attend_by_blocks(query: ByHead, key: ByHead, value: ByHead, block_mask: Any, scale: float) -> Tensor:
    """The same by flex attention, which leaves out the blocks in which nobody sees anybody."""
    out: Tensor = _flex(query.device.type)(
        query, key, value, block_mask=block_mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2)


@cache
def _flex(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device_type == "cpu" else torch.compile(flex_attention, dynamic=True)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: ByToken, key: ByToken, value: ByToken, packed: Packed, scale: float) -> ByToken:
        out = query.new_empty(query.shape)
        lse = out.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for seen, by, causal in _shared_parts(packed):
            found, found_lse = attend(
                _heads(query[by]), _heads(key[seen]), _heads(value[seen]), scale=scale, causal=causal
            )
            out[by], lse[by] = found[0].transpose(0, 1), found_lse[0].T
        for own in packed.own:
            parts = (own.take(each).transpose(1, 2) for each in (query, key, value))
            found, found_lse = (own.once(each.transpose(1, 2)) for each in attend(*parts, scale=scale, causal=True))
            before, before_lse = out[own.where], lse[own.where]
            out[own.where] = merge(before, before_lse, found, found_lse)
            lse[own.where] = torch.logaddexp(before_lse, found_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.packed, ctx.scale = packed, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        packed, scale, (grad,) = ctx.packed, ctx.scale, grads
        by_query, by_key, by_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for seen, by, causal in _shared_parts(packed):
            parts = _heads(grad[by]), _heads(query[by]), _heads(key[seen]), _heads(value[seen])
            merged = _heads(out[by]), lse[by].T[None]
            found = attend_backward(*parts, merged, scale=scale, causal=causal)
            by_query[by] = found[0][0].transpose(0, 1)
            by_key[seen] += found[1][0].transpose(0, 1)
            by_value[seen] += found[2][0].transpose(0, 1)
        for own in packed.own:
            own_query, own_key, own_value, own_out, own_lse = (
                own.take(each).transpose(1, 2) for each in (query, key, value, out, lse)
            )
            parts = own.without_repeats(own.take(grad)).transpose(1, 2), own_query, own_key, own_value
            found = attend_backward(*parts, (own_out, own_lse), scale=scale, causal=True)
            for whole, part in zip((by_query, by_key, by_value), found, strict=True):
                whole[own.where] += own.once(part.transpose(1, 2))
        return by_query, by_key, by_value, None, None


def _shared_parts(packed: Packed) -> Iterator[tuple[slice, slice, bool]]:
    """(the prompt that is seen, those who see it, whether each sees only what is before it)."""
    for prompt, tail in zip(packed.prompts, packed.tails, strict=True):
        yield prompt, prompt, True
        if tail.stop > tail.start:
            yield prompt, tail, False


def _heads(values: ByToken) -> ByHead:
    return values.transpose(0, 1)[None]
