"""Prompts and completions in one sequence without padding, and attention over it.

Every token passes the network once. The tokens of a completion attend to their prompt, whose keys and values are not
copied, and to the tokens before them in the same completion. Gradients flow back into the prompt.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from groupwise.core.errors import UserError, is_out_of_memory
from groupwise.core.transfer import send, send_list
from groupwise.dist.devices import traits
from groupwise.workloads.chat.engine.attention import (
    FUSED_KERNELS,
    PRODUCTS,
    AttentionKernel,
    Inputs,
    KVByLayer,
    Scoring,
    merge_by_lse,
)

ATTENTION_VARIABLE = "GROUPWISE_ATTENTION"
"""The environment variable that names the only kernel to try."""

TokenIds = Sequence[int]
ByToken = Shaped[Tensor, "tokens ..."]
ByRow = Shaped[Tensor, "rows longest ..."]
TokensByHead = Float[Tensor, "tokens heads width"]


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
    _parts: dict[tuple[bool, bool], list[AttentionPart]] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if self.kv_out is not None:
            self.kv_out[layer] = (key[0], value[0])
        return choose_attention(AttentionShape.of(query, key)).attend((query, key, value), self, scale)

    @cached_property
    def logit_positions(self) -> Int64[Tensor, " positions"]:
        """The last token of each prompt, then all tokens of the completions."""
        last = [prompt.stop - 1 for prompt in self.prompt_slices]
        return send_list([*last, *range(self.prompt_slices[-1].stop, len(self.ids))], self.ids.device)

    def parts(self, kernel: AttentionKernel) -> list[AttentionPart]:
        """The three kinds of attention as calls of a kernel."""
        kind = kernel.batches_prompts, kernel.takes_bias
        if kind not in self._parts:
            self._parts[kind] = list(_prompt_parts(self, kernel)) + [
                AttentionPart(table, table, causal=True, merges=True) for table in self.completion_tables
            ]
        return self._parts[kind]

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

    def add_to(self, total: ByToken, values: ByRow) -> None:
        """Add values of a table, which are zero in its padding, to those of the packed sequence."""
        if isinstance(self.token_index, slice):
            total[self.token_index] += values.flatten(0, 1)
        else:
            total.index_add_(0, self.table.flatten(), values.flatten(0, 1).to(total.dtype))


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


@dataclass(frozen=True, eq=False)
class AttentionPart:
    """Attention of the tokens in a table to those in another one, line by line."""

    queries: CompletionTable
    keys: CompletionTable
    causal: bool
    key_bias: Float[Tensor, "rows 1 1 longest"] | None = None
    """Hides the padding of keys, where it would be seen."""
    merges: bool = False
    """Whether its queries have attended to other keys in a part before."""

    def scoring(self, scale: float) -> Scoring:
        return Scoring(scale, self.causal, self.key_bias)

    def gather(self, query: TokensByHead, key: TokensByHead, value: TokensByHead) -> Inputs:
        """Queries, keys and values, [rows, heads, longest, width]."""
        return (
            self.queries.gather(query).transpose(1, 2),
            self.keys.gather(key).transpose(1, 2),
            self.keys.gather(value).transpose(1, 2),
        )


def _prompt_parts(packed: PackedBatch, kernel: AttentionKernel) -> Iterator[AttentionPart]:
    """Prompts within themselves, and completions to their prompt: prompt by prompt, or with few calls for all."""
    device = packed.ids.device
    used = [pair for pair in zip(packed.prompt_slices, packed.completion_slices, strict=True) if _length(pair[1])]
    if kernel.batches_prompts:
        within = make_completion_tables(*_bounds(packed.prompt_slices), device)
        together = _similar_sizes(used, same_prompt_length=not kernel.takes_bias)
    else:
        within = [_make_table(*_bounds([prompt]), device) for prompt in packed.prompt_slices]
        together = [[pair] for pair in used]
    for table in within:
        yield AttentionPart(table, table, causal=True)
    for pairs in together:
        prompts, completions = zip(*pairs, strict=True)
        keys, queries = (_make_table(*_bounds(slices), device) for slices in (prompts, completions))
        yield AttentionPart(queries, keys, causal=False, key_bias=_padding_bias(prompts, device))


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _bounds(slices: Sequence[slice]) -> tuple[Tensor, Tensor]:
    """Starts and lengths."""
    return torch.tensor([part.start for part in slices]), torch.tensor([part.stop - part.start for part in slices])


def _similar_sizes(
    pairs: Sequence[tuple[slice, slice]], *, same_prompt_length: bool
) -> list[list[tuple[slice, slice]]]:
    """Prompts and their completions whose lengths have the same numbers of binary digits, or the same prompt length."""
    by_size: dict[tuple[int, int], list[tuple[slice, slice]]] = {}
    for prompt, completions in pairs:
        prompt_size = _length(prompt) if same_prompt_length else _length(prompt).bit_length()
        by_size.setdefault((prompt_size, _length(completions).bit_length()), []).append((prompt, completions))
    return list(by_size.values())


def _padding_bias(prompts: Sequence[slice], device: torch.device) -> Tensor | None:
    lengths = _bounds(prompts)[1]
    if bool((lengths == lengths[0]).all()):
        return None
    padding = torch.arange(int(lengths.max()))[None] >= lengths[:, None]
    return send(torch.zeros(padding.shape).masked_fill_(padding, -torch.inf)[:, None, None], device)


class _AttentionByParts(torch.autograd.Function):
    """Prompts within themselves, completions to their prompt, completions within themselves: merged by log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        query: TokensByHead,
        key: TokensByHead,
        value: TokensByHead,
        packed: PackedBatch,
        scale: float,
        kernel: AttentionKernel,
    ) -> TokensByHead:
        out = query.new_empty(query.shape)
        lse = out.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        parts, saved = packed.parts(kernel), []
        for part in parts:
            inputs, tokens = part.gather(query, key, value), part.queries.token_index
            *outputs, kept = kernel.forward(inputs, part.scoring(scale))
            part_out, part_lse = (part.queries.scatter(tensor.transpose(1, 2)) for tensor in outputs)
            if part.merges:
                before, lse_before = out[tokens], lse[tokens]
                part_out = merge_by_lse(before, lse_before, part_out, part_lse)
                part_lse = torch.logaddexp(lse_before, part_lse)
            out[tokens], lse[tokens] = part_out, part_lse
            saved.append(kept)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.parts, ctx.saved, ctx.scale, ctx.kernel = parts, saved, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        totals = [torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (query, key, value)]
        for part, kept in zip(ctx.parts, ctx.saved, strict=True):
            queries = part.queries
            merged = queries.gather(out).transpose(1, 2), queries.gather(lse).transpose(1, 2)
            grad = queries.zero_padding(queries.gather(grads[0])).transpose(1, 2)
            inputs, scoring = part.gather(query, key, value), part.scoring(ctx.scale)
            gradients = ctx.kernel.backward(grad, inputs, merged, kept, scoring)
            for total, table, gradient in zip(totals, (queries, part.keys, part.keys), gradients, strict=True):
                table.add_to(total, gradient.transpose(1, 2))
        return (*(total.to(query.dtype) for total in totals), None, None, None)


@dataclass(frozen=True)
class ByParts:
    """Attention over a packed sequence by a kernel that returns its log-sum-exp; no mask of its size is made."""

    kernel: AttentionKernel = PRODUCTS

    @property
    def name(self) -> str:
        return self.kernel.name

    def __call__(self, inputs: Inputs, packed: PackedBatch, scale: float) -> Tensor:
        by_token = (tensor[0].transpose(0, 1) for tensor in inputs)
        out: Tensor = _AttentionByParts.apply(*by_token, packed, scale, self.kernel)
        return out[None]


@dataclass(frozen=True)
class Flex:
    """The same by flex attention, compiled but on the CPU, which skips blocks without a visible key."""

    name: str = "flex"

    def __call__(self, inputs: Inputs, packed: PackedBatch, scale: float) -> Tensor:
        query, key, value = inputs
        out: Tensor = _flex(query.device.type)(
            query, key, value, block_mask=packed.block_mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2)


@cache
def _flex(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device_type == "cpu" else torch.compile(flex_attention, dynamic=True)


class AttentionShape(NamedTuple):
    """What the choice of an attention kernel depends on."""

    device_type: str
    dtype: torch.dtype
    heads: int
    key_heads: int
    width: int

    @staticmethod
    def of(query: Tensor, key: Tensor) -> AttentionShape:
        return AttentionShape(query.device.type, query.dtype, query.shape[1], key.shape[1], query.shape[3])


@dataclass(frozen=True)
class ChosenAttention:
    attend: ByParts | Flex
    reason: str
    """Why not those that would be tried before; empty where there are none."""

    @property
    def kernel(self) -> AttentionKernel:
        """For attention to padded keys with a bias, as decoding needs it."""
        kernel = self.attend.kernel if isinstance(self.attend, ByParts) else PRODUCTS
        return kernel if kernel.takes_bias else PRODUCTS


@cache
def choose_attention(shape: AttentionShape) -> ChosenAttention:
    """The first that agrees with matrix products: compiled flex attention, torch's fused kernels; else the products."""
    device, wanted = torch.device(shape.device_type), os.environ.get(ATTENTION_VARIABLE)
    names = ["flex", *(kernel.name for kernel in FUSED_KERNELS), PRODUCTS.name]
    if wanted is not None and wanted not in names:
        raise UserError(f"{ATTENTION_VARIABLE} is {wanted!r}: name one of {', '.join(names)}, or leave it unset.")
    candidates: list[ByParts | Flex] = [Flex()] if traits(device).compiles_attention else []
    candidates += [ByParts(kernel) for kernel in FUSED_KERNELS if kernel.is_on(device)]
    reasons = [f"{device.type} has no other kernel"] if not candidates else []
    if wanted is not None:
        reasons.append(f"{ATTENTION_VARIABLE} is {wanted!r}")
    for attend in candidates:
        if wanted not in (None, attend.name):
            continue
        problem = disagreement(attend, shape)
        if problem is None:
            return ChosenAttention(attend, "; ".join(reasons))
        reasons.append(f"{attend.name}: {problem}")
    return ChosenAttention(ByParts(), "; ".join(reasons))


_PROMPTS = [0] * 37, [1] * 3, [2] * 2, [3] * 2
_COMPLETIONS = [[0] * 34, [1], []], [[2] * 3, [3] * 2], [[4] * 4], [[5] * 7]
"""More tokens than 32, to which some pad; prompts of similar lengths, where a bias hides padding, and of the same."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.03}
"""Largest accepted difference from matrix products, relative to the largest value."""


def disagreement(attend: ByParts | Flex, shape: AttentionShape) -> str | None:
    """How its outputs or gradients differ from those of matrix products, on a small packed batch; None if not."""
    device, dtype, *heads, width = torch.device(shape.device_type), shape.dtype, *shape[2:]

    def outputs(each: ByParts | Flex) -> list[Tensor]:
        packed, generator = pack_batch(_PROMPTS, _COMPLETIONS, device), torch.Generator().manual_seed(0)
        sizes = [(1, count, len(packed.ids), width) for count in (heads[0], heads[0], heads[1], heads[1])]
        grad, query, key, value = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
        inputs = query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
        out = each(inputs, packed, width**-0.5)
        return [out, *torch.autograd.grad(out, inputs, grad.transpose(1, 2))]

    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            pairs = zip(outputs(attend), outputs(ByParts()), strict=True)
            errors = torch.stack([(own - exact).abs().max() / exact.abs().max() for own, exact in pairs]).tolist()
    except Exception as error:  # a compiler or a driver may raise anything
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
    names = ("outputs", "gradients of queries", "gradients of keys", "gradients of values")
    for name, difference in zip(names, errors, strict=True):
        if not difference <= _TOLERANCE[dtype]:
            return f"its {name} differ by {difference:.1g} from those of matrix products"
    return None
