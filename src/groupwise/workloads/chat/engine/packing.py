"""Prompts and completions in one row without padding: a prompt once, its completions after it, all seeing it.

Every token goes through the network once. A completion's tokens attend to their prompt (its keys and values are not
copied) and to what stands before them in their own completion; gradients flow back into the prompt.
Attention over a packed sequence, without a mask of its size: by parts on the CPU, by blocks elsewhere.
Completions of like length side by side, for attention within each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from groupwise.workloads.chat.engine.attention import attend, attend_backward, merge_by_lse

ByToken = Shaped[Tensor, "tokens ..."]
ByRow = Shaped[Tensor, "rows ..."]


@dataclass(frozen=True, eq=False)
class CompletionTable:
    """Numbers of tokens as a table with one line a completion. A shorter line repeats its last token: as a query that
    has no gradient it moves nothing, and as a key only such queries see it.
    """

    table: Int64[Tensor, "rows longest"]
    where: slice | Tensor
    """The same tokens, each once: as a slice where they are neighbours in one block."""
    real: Tensor | None
    """The places in the flattened table that are no repeats; None if all are."""

    def take(self, values: ByToken) -> ByRow:
        """[tokens, ...] as [rows, longest, ...]."""
        if isinstance(self.where, slice):
            return values[self.where].unflatten(0, self.table.shape)
        return values[self.table]

    def once(self, values: ByRow) -> ByToken:
        """[rows, longest, ...] as [tokens, ...], in the order of `where`."""
        flat = values.flatten(0, 1)
        return flat if self.real is None else flat[self.real]

    def without_repeats(self, values: ByRow) -> ByRow:
        """Zero where the table repeats a token."""
        if self.real is None:
            return values
        zeros = torch.zeros_like(values).flatten(0, 1)
        zeros[self.real] = values.flatten(0, 1)[self.real]
        return zeros.unflatten(0, self.table.shape)


def completion_tables(starts: Tensor, lengths: Tensor, device: torch.device) -> list[CompletionTable]:
    """Lines whose lengths have equally many binary digits share a table, so at most half of it are repeats."""
    digits = torch.tensor([int(length).bit_length() for length in lengths])
    return [
        _table(starts[digits == size], lengths[digits == size], device) for size in sorted({*digits.tolist()} - {0})
    ]


def _table(starts: Tensor, lengths: Tensor, device: torch.device) -> CompletionTable:
    places = torch.arange(int(lengths.max()))
    table = starts[:, None] + torch.minimum(places, lengths[:, None] - 1)
    real = (places < lengths[:, None]).flatten().nonzero().flatten()
    tokens = table.flatten()[real]
    first, count = int(tokens[0]), len(tokens)
    all_real = count == table.numel()
    if all_real and torch.equal(tokens, torch.arange(first, first + count)):
        return CompletionTable(table.to(device), slice(first, first + count), None)
    return CompletionTable(table.to(device), tokens.to(device), None if all_real else real.to(device))


TokensByHead = Float[Tensor, "tokens heads width"]
ByHead = Float[Tensor, "1 heads tokens width"]


def packed_attention_flash(query: ByHead, key: ByHead, value: ByHead, packed: PackedBatch, scale: float) -> Tensor:
    """Prompts causally, completions to their prompt, completions within themselves: merged by log-sum-exp."""
    out: Tensor = _PackedAttention.apply(*(each[0].transpose(0, 1) for each in (query, key, value)), packed, scale)
    return out[None]


def packed_attention_flex(query: ByHead, key: ByHead, value: ByHead, block_mask: Any, scale: float) -> Tensor:
    """The same by flex attention, which leaves out the blocks in which nobody sees anybody."""
    out: Tensor = _flex(query.device.type)(
        query, key, value, block_mask=block_mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2)


@cache
def _flex(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device_type == "cpu" else torch.compile(flex_attention, dynamic=True)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: TokensByHead, key: TokensByHead, value: TokensByHead, packed: PackedBatch, scale: float
    ) -> TokensByHead:
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
            out[own.where] = merge_by_lse(before, before_lse, found, found_lse)
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


def _shared_parts(packed: PackedBatch) -> Iterator[tuple[slice, slice, bool]]:
    """(the prompt that is seen, those who see it, whether each sees only what is before it)."""
    for prompt, tail in zip(packed.prompts, packed.tails, strict=True):
        yield prompt, prompt, True
        if tail.stop > tail.start:
            yield prompt, tail, False


def _heads(values: TokensByHead) -> ByHead:
    return values.transpose(0, 1)[None]


KVByLayer = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """[prompt 0, prompt 1, ..., completions of prompt 0, of prompt 1, ...] as one sequence."""

    prompts: Sequence[slice]
    tails: Sequence[slice]
    """The tokens of each prompt's completions, in the prompts' order."""
    own: Sequence[CompletionTable]
    ids: Int64[Tensor, " tokens"]
    positions: Int64[Tensor, " tokens"]
    group: Int64[Tensor, " tokens"]
    row: Int64[Tensor, " tokens"]
    """Number of the completion, or -1 in a prompt."""
    keep: KVByLayer | None = None
    """Where to leave the keys and values of each layer, if anywhere."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `attention.Layout`; the batch is one sequence."""
        if self.keep is not None:
            self.keep[layer] = (key[0], value[0])
        if query.device.type == "cpu":
            return packed_attention_flash(query, key, value, self, scale)
        return packed_attention_flex(query, key, value, self.block_mask, scale)

    @cached_property
    def predicting(self) -> Int64[Tensor, " predicting"]:
        """The last token of each prompt, then all of the completions."""
        last = [prompt.stop - 1 for prompt in self.prompts]
        return torch.tensor([*last, *range(self.prompts[-1].stop, len(self.ids))], device=self.ids.device)

    @cached_property
    def block_mask(self) -> Any:
        """Who sees whom, for flex attention."""
        from torch.nn.attention.flex_attention import create_block_mask

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own_or_prompt = (self.row[key] < 0) | (self.row[key] == self.row[query])
            return (self.group[key] == self.group[query]) & own_or_prompt & (key <= query)

        tokens = len(self.ids)
        # Compiled, else the whole table of who sees whom is held for a moment.
        compiled = self.ids.device.type != "cpu"
        return create_block_mask(sees, None, None, tokens, tokens, device=str(self.ids.device), _compile=compiled)


def pack_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int]]],
    device: torch.device,
    keep: KVByLayer | None = None,
) -> PackedBatch:
    """completions[g] are those of prompts[g]; an empty one takes no place."""
    members = [len(group) for group in completions]
    segments = [*prompts, *(ids for group in completions for ids in group)]
    groups = [*range(len(prompts)), *(nth for nth, count in enumerate(members) for _ in range(count))]
    rows = [*([-1] * len(prompts)), *range(sum(members))]
    firsts = [*([0] * len(prompts)), *(len(prompts[group]) for group in groups[len(prompts) :])]
    sizes = torch.tensor([len(ids) for ids in segments])
    starts = sizes.cumsum(0) - sizes

    def spread(values: Sequence[int]) -> Tensor:
        return torch.tensor(values).repeat_interleave(sizes).to(device)

    places = torch.arange(int(sizes.sum())) - starts.repeat_interleave(sizes)
    slices = _neighbours([*map(len, prompts), *(sum(map(len, group)) for group in completions)])
    return PackedBatch(
        prompts=slices[: len(prompts)],
        tails=slices[len(prompts) :],
        own=completion_tables(starts[len(prompts) :], sizes[len(prompts) :], device),
        ids=torch.tensor([token for ids in segments for token in ids], device=device),
        positions=places.to(device) + spread(firsts),
        group=spread(groups),
        row=spread(rows),
        keep=keep,
    )


def _neighbours(sizes: Sequence[int]) -> list[slice]:
    """Slices of these sizes, one after another."""
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
