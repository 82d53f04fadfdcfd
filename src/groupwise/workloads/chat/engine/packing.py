"""Prompts and completions in one sequence without padding, and attention over it.

Every token passes the network once. The tokens of a completion attend to their prompt, whose keys and values are not
copied, and to the tokens before them in the same completion. Gradients flow back into the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from groupwise.core.transfer import send, send_list
from groupwise.dist.devices import traits
from groupwise.workloads.chat.engine.attention import (
    KVByLayer,
    attend,
    attend_backward,
    attention_eager,
    attention_eager_backward,
    merge_by_lse,
)

TokenIds = Sequence[int]
ByToken = Shaped[Tensor, "tokens ..."]
ByRow = Shaped[Tensor, "rows longest ..."]
TokensByHead = Float[Tensor, "tokens heads width"]
ByHead = Float[Tensor, "1 heads tokens width"]


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """[prompt 0, prompt 1, ..., completions of prompt 0, of prompt 1, ...] as one sequence: an `AttentionLayout`."""

    prompt_slices: Sequence[slice]
    completion_slices: Sequence[slice]
    """All completions of a prompt, in the order of the prompts."""
    completion_tables: Sequence[CompletionTable]
    ids: Int64[Tensor, " tokens"]
    position_ids: Int64[Tensor, " tokens"]
    group_of_token: Int64[Tensor, " tokens"]
    row_of_token: Int64[Tensor, " tokens"]
    """Index of the completion, or -1 in a prompt."""
    kv_out: KVByLayer | None = None
    """Receives the keys and values of every layer, if given."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if self.kv_out is not None:
            self.kv_out[layer] = (key[0], value[0])
        kernel = packed_kernel(query.device).name
        if kernel == "flash":
            return packed_attention_flash(query, key, value, self, scale)
        if kernel == "flex":
            return packed_attention_flex(query, key, value, self.block_mask, scale)
        return packed_attention_products(query, key, value, self, scale)

    @cached_property
    def logit_positions(self) -> Int64[Tensor, " positions"]:
        """The last token of each prompt, then all tokens of the completions."""
        last = [prompt.stop - 1 for prompt in self.prompt_slices]
        return send_list([*last, *range(self.prompt_slices[-1].stop, len(self.ids))], self.ids.device)

    @cached_property
    def batched_parts(self) -> list[BatchedPart]:
        """The three kinds of attention as few batched ones, for `packed_attention_products`."""
        return list(_batched_parts(self))

    @cached_property
    def block_mask(self) -> Any:
        """The mask for flex attention."""
        from torch.nn.attention.flex_attention import create_block_mask

        group, row = self.group_of_token, self.row_of_token

        def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            prompt_or_same_row = (row[key] < 0) | (row[key] == row[query])
            return (group[key] == group[query]) & prompt_or_same_row & (key <= query)

        tokens = len(self.ids)
        # Not compiled, it would hold the whole [tokens, tokens] mask for a moment.
        compiled = self.ids.device.type != "cpu"
        return create_block_mask(is_visible, None, None, tokens, tokens, device=str(self.ids.device), _compile=compiled)


def pack_batch(
    prompts: Sequence[TokenIds],
    completions: Sequence[Sequence[TokenIds]],
    device: torch.device,
    kv_out: KVByLayer | None = None,
) -> PackedBatch:
    """Pack prompts and their completions: completions[g] follow prompts[g]. A completion may be empty."""
    members = [len(group) for group in completions]
    segments = [*prompts, *(ids for group in completions for ids in group)]
    groups = [*range(len(prompts)), *(group for group, count in enumerate(members) for _ in range(count))]
    rows = [*([-1] * len(prompts)), *range(sum(members))]
    first_positions = [*([0] * len(prompts)), *(len(prompts[group]) for group in groups[len(prompts) :])]
    lengths = torch.tensor([len(ids) for ids in segments])
    starts = lengths.cumsum(0) - lengths

    def per_token(values: Sequence[int]) -> Tensor:
        return send(torch.tensor(values).repeat_interleave(lengths), device)

    offsets = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
    slices = _consecutive_slices([*map(len, prompts), *(sum(map(len, group)) for group in completions)])
    return PackedBatch(
        prompt_slices=slices[: len(prompts)],
        completion_slices=slices[len(prompts) :],
        completion_tables=make_completion_tables(starts[len(prompts) :], lengths[len(prompts) :], device),
        ids=send_list([token for ids in segments for token in ids], device),
        position_ids=send(offsets, device) + per_token(first_positions),
        group_of_token=per_token(groups),
        row_of_token=per_token(rows),
        kv_out=kv_out,
    )


def _consecutive_slices(sizes: Sequence[int]) -> list[slice]:
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


@dataclass(frozen=True, eq=False)
class CompletionTable:
    """Completions of similar length as a padded batch, for attention within each of them.

    A line is padded on the right with its last token. Padding queries get no gradient, and only they see padding keys.
    """

    table: Int64[Tensor, "rows longest"]
    """Indices of tokens in the packed sequence."""
    token_index: slice | Tensor
    """The same indices without padding; a slice where they are consecutive."""
    valid: Tensor | None
    """Positions in the flattened table that are not padding; None if all are valid."""

    def gather(self, values: ByToken) -> ByRow:
        """From the packed sequence into the table: [tokens, ...] -> [rows, longest, ...]."""
        if isinstance(self.token_index, slice):
            return values[self.token_index].unflatten(0, self.table.shape)
        return values[self.table]

    def scatter(self, values: ByRow) -> ByToken:
        """From the table into the order of `token_index`: [rows, longest, ...] -> [tokens, ...]."""
        flat = values.flatten(0, 1)
        return flat if self.valid is None else flat[self.valid]

    def zero_padding(self, values: ByRow) -> ByRow:
        if self.valid is None:
            return values
        zeros = torch.zeros_like(values).flatten(0, 1)
        zeros[self.valid] = values.flatten(0, 1)[self.valid]
        return zeros.unflatten(0, self.table.shape)


def make_completion_tables(starts: Tensor, lengths: Tensor, device: torch.device) -> list[CompletionTable]:
    """One table for all lengths with the same number of binary digits, so that at most half of it is padding."""
    digits = torch.tensor([int(length).bit_length() for length in lengths])
    return [
        _make_table(starts[digits == size], lengths[digits == size], device)
        for size in sorted({*digits.tolist()} - {0})
    ]


def _make_table(starts: Tensor, lengths: Tensor, device: torch.device) -> CompletionTable:
    positions = torch.arange(int(lengths.max()))
    table = starts[:, None] + torch.minimum(positions, lengths[:, None] - 1)
    valid = (positions < lengths[:, None]).flatten().nonzero().flatten()
    tokens = table.flatten()[valid]
    first, count = int(tokens[0]), len(tokens)
    all_valid = count == table.numel()
    if all_valid and torch.equal(tokens, torch.arange(first, first + count)):
        return CompletionTable(send(table, device), slice(first, first + count), None)
    return CompletionTable(send(table, device), send(tokens, device), None if all_valid else send(valid, device))


@dataclass(frozen=True)
class PackedKernel:
    """How attention over a packed sequence is computed on a type of device."""

    name: Literal["flash", "flex", "products"]
    reason: str
    """Why not a faster one; empty where there is none."""


@cache
def _packed_kernel(device: torch.device) -> PackedKernel:
    if traits(device).flash_with_lse:
        return PackedKernel("flash", "")
    if not traits(device).compiles_attention:
        return PackedKernel("products", f"{device.type} has no attention kernel that torch compiles")
    packed = pack_batch([[1, 2, 3], [4]], [[[5, 6], [7]], [[8, 9, 10]]], device)
    query, key, value = (torch.randn(1, heads, len(packed.ids), 16, device=device) for heads in (4, 2, 2))
    try:
        flex = packed_attention_flex(query, key, value, packed.block_mask, 0.25)
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        return PackedKernel("products", f"flex attention does not compile: {str(error).splitlines()[0]}")
    if not torch.allclose(flex, packed_attention_products(query, key, value, packed, 0.25), rtol=0.02, atol=0.02):
        return PackedKernel("products", "compiled flex attention gives other numbers than matrix products")
    return PackedKernel("flex", "")


def packed_kernel(device: torch.device) -> PackedKernel:
    """The fastest kernel that works: torch's for the CPU, compiled flex attention if it compiles, else products."""
    return _packed_kernel(torch.device(device.type))


def packed_attention_flash(query: ByHead, key: ByHead, value: ByHead, packed: PackedBatch, scale: float) -> Tensor:
    """Attention over a packed sequence by the CPU's flash kernels; no mask of its size is made."""
    by_token = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out: Tensor = _PackedAttention.apply(*by_token, packed, scale)
    return out[None]


def packed_attention_flex(query: ByHead, key: ByHead, value: ByHead, block_mask: Any, scale: float) -> Tensor:
    """The same by flex attention, which skips blocks without a visible key."""
    out: Tensor = _flex(query.device.type)(
        query, key, value, block_mask=block_mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2)


def packed_attention_products(query: ByHead, key: ByHead, value: ByHead, packed: PackedBatch, scale: float) -> Tensor:
    """The same by matrix products, on any device: prompts and completions of similar length together."""
    by_token = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out: Tensor = _PackedProducts.apply(*by_token, packed, scale)
    return out[None]


@cache
def _flex(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device_type == "cpu" else torch.compile(flex_attention, dynamic=True)


class _PackedAttention(torch.autograd.Function):
    """Prompts within themselves, completions to their prompt, completions within themselves: merged by log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, query: TokensByHead, key: TokensByHead, value: TokensByHead, packed: PackedBatch, scale: float
    ) -> TokensByHead:
        out = query.new_empty(query.shape)
        lse = out.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for keys, queries, causal in _prompt_attention(packed):
            part, part_lse = attend(
                _heads(query[queries]), _heads(key[keys]), _heads(value[keys]), scale=scale, causal=causal
            )
            out[queries], lse[queries] = part[0].transpose(0, 1), part_lse[0].T
        for table in packed.completion_tables:
            inputs = (table.gather(tensor).transpose(1, 2) for tensor in (query, key, value))
            outputs = attend(*inputs, scale=scale, causal=True)
            part, part_lse = (table.scatter(tensor.transpose(1, 2)) for tensor in outputs)
            tokens = table.token_index
            prompt_part, prompt_lse = out[tokens], lse[tokens]
            out[tokens] = merge_by_lse(prompt_part, prompt_lse, part, part_lse)
            lse[tokens] = torch.logaddexp(prompt_lse, part_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.packed, ctx.scale = packed, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        packed, scale, (grad,) = ctx.packed, ctx.scale, grads
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for keys, queries, causal in _prompt_attention(packed):
            inputs = _heads(grad[queries]), _heads(query[queries]), _heads(key[keys]), _heads(value[keys])
            merged = _heads(out[queries]), lse[queries].T[None]
            parts = attend_backward(*inputs, merged, scale=scale, causal=causal)
            grad_query[queries] = parts[0][0].transpose(0, 1)
            grad_key[keys] += parts[1][0].transpose(0, 1)
            grad_value[keys] += parts[2][0].transpose(0, 1)
        for table in packed.completion_tables:
            table_query, table_key, table_value, table_out, table_lse = (
                table.gather(tensor).transpose(1, 2) for tensor in (query, key, value, out, lse)
            )
            table_grad = table.zero_padding(table.gather(grad)).transpose(1, 2)
            merged = table_out, table_lse
            parts = attend_backward(table_grad, table_query, table_key, table_value, merged, scale=scale, causal=True)
            for total, part in zip((grad_query, grad_key, grad_value), parts, strict=True):
                total[table.token_index] += table.scatter(part.transpose(1, 2))
        return grad_query, grad_key, grad_value, None, None


def _prompt_attention(packed: PackedBatch) -> Iterator[tuple[slice, slice, bool]]:
    """Attention to prompts, as (keys, queries, whether it is causal)."""
    for prompt, completions in zip(packed.prompt_slices, packed.completion_slices, strict=True):
        yield prompt, prompt, True
        if completions.stop > completions.start:
            yield prompt, completions, False


def _heads(values: TokensByHead) -> ByHead:
    return values.transpose(0, 1)[None]


@dataclass(frozen=True, eq=False)
class BatchedPart:
    """Attention of the tokens in a table to those in another one, line by line."""

    queries: CompletionTable
    keys: CompletionTable
    causal: bool
    key_bias: Float[Tensor, "rows 1 1 longest"] | None
    """Hides the padding of keys, where it would be seen."""


def _batched_parts(packed: PackedBatch) -> Iterator[BatchedPart]:
    device = packed.ids.device
    starts, lengths = _bounds(packed.prompt_slices)
    for table in make_completion_tables(starts, lengths, device):
        yield BatchedPart(table, table, True, None)
    used = [index for index, tokens in enumerate(packed.completion_slices) if tokens.stop > tokens.start]
    prompts, completions = (
        [parts[index] for index in used] for parts in (packed.prompt_slices, packed.completion_slices)
    )
    for indices in _similar_sizes(prompts, completions):
        keys, queries = (
            _make_table(*_bounds([parts[index] for index in indices]), device) for parts in (prompts, completions)
        )
        yield BatchedPart(queries, keys, False, _padding_bias([prompts[index] for index in indices], device))
    for table in packed.completion_tables:
        yield BatchedPart(table, table, True, None)


def _bounds(slices: Sequence[slice]) -> tuple[Tensor, Tensor]:
    """Starts and lengths."""
    return torch.tensor([part.start for part in slices]), torch.tensor([part.stop - part.start for part in slices])


def _similar_sizes(prompts: Sequence[slice], completions: Sequence[slice]) -> list[list[int]]:
    """Indices of those whose lengths have the same numbers of binary digits."""
    by_size: dict[tuple[int, int], list[int]] = {}
    for index, (prompt, own) in enumerate(zip(prompts, completions, strict=True)):
        size = (prompt.stop - prompt.start).bit_length(), (own.stop - own.start).bit_length()
        by_size.setdefault(size, []).append(index)
    return list(by_size.values())


def _padding_bias(prompts: Sequence[slice], device: torch.device) -> Tensor | None:
    lengths = _bounds(prompts)[1]
    if bool((lengths == lengths[0]).all()):
        return None
    padding = torch.arange(int(lengths.max()))[None] >= lengths[:, None]
    return send(torch.zeros(padding.shape).masked_fill_(padding, -torch.inf)[:, None, None], device)


class _PackedProducts(torch.autograd.Function):
    """As `_PackedAttention`, part after part of `batched_parts`; out = sum_i exp(lse_i - lse) out_i."""

    @staticmethod
    def forward(
        ctx: Any, query: TokensByHead, key: TokensByHead, value: TokensByHead, packed: PackedBatch, scale: float
    ) -> TokensByHead:
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        lse = out.new_full(query.shape[:2], -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
        for part in packed.batched_parts:
            inputs = _table_inputs(part, query, key, value)
            outputs = attention_eager(*inputs, scale=scale, causal=part.causal, bias=part.key_bias)
            part_out, part_lse = (part.queries.scatter(tensor.transpose(1, 2)) for tensor in outputs)
            tokens = part.queries.token_index
            merged = torch.logaddexp(lse[tokens], part_lse)
            kept, added = ((own - merged).exp_()[..., None].to(out.dtype) for own in (lse[tokens], part_lse))
            out[tokens], lse[tokens] = out[tokens] * kept + part_out * added, merged
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.packed, ctx.scale = packed, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        exact = lse.dtype
        totals = [torch.zeros_like(tensor, dtype=exact) for tensor in (query, key, value)]
        for part in ctx.packed.batched_parts:
            queries = part.queries
            inputs = _table_inputs(part, query, key, value)
            merged = queries.gather(out).transpose(1, 2), queries.gather(lse).transpose(1, 2)
            grad = queries.zero_padding(queries.gather(grads[0])).transpose(1, 2)
            gradients = attention_eager_backward(
                grad, *inputs, merged, scale=ctx.scale, causal=part.causal, bias=part.key_bias
            )
            # Padding repeats a token, with a gradient of zero.
            for total, table, gradient in zip(totals, (queries, part.keys, part.keys), gradients, strict=True):
                total.index_add_(0, table.table.flatten(), gradient.transpose(1, 2).flatten(0, 1).to(exact))
        return (*(total.to(query.dtype) for total in totals), None, None)


def _table_inputs(
    part: BatchedPart, query: TokensByHead, key: TokensByHead, value: TokensByHead
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a part, [rows, heads, longest, width]."""
    return (
        part.queries.gather(query).transpose(1, 2),
        part.keys.gather(key).transpose(1, 2),
        part.keys.gather(value).transpose(1, 2),
    )
