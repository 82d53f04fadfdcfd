"""Rows of different length, depth and top-k through transformers' own blocks, without padding.

Rows are packed into one sequence. Two functions, registered through transformers' own interfaces, keep them apart: the
attention stays inside a row, and the experts compute only the token-expert pairs of each row's top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from operator import is_
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, grouped_mm, linear, pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import ModelAdapter
from groupwise.workloads.controller.model.knobs import WorkCounts

NAME = "groupwise_packed"

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of packed tokens."""
KeysValues = tuple[Float[Tensor, "heads tokens width"], Float[Tensor, "heads tokens width"]]
AttentionMask = Bool[Tensor, "tokens tokens"]
"""Which tokens (rows) attend to which (columns)."""


@dataclass
class WorkCounter:
    """Counts the work that is executed, where it is executed."""

    crops: int = 0
    block_rows: int = 0
    expert_pairs: int = 0
    patches: int = 0

    @property
    def counts(self) -> WorkCounts:
        return WorkCounts(self.crops, self.block_rows, self.expert_pairs, self.patches)


@dataclass(frozen=True)
class PackedRows:
    """The layout of the packed sequence, and the top-k of each token."""

    lengths: tuple[int, ...]
    top_k: Int64[Tensor, " tokens"]
    """0 for a token whose state is not read any more."""
    counter: WorkCounter
    past: BlockKVCache | None = None
    """Keys and values of earlier tokens, when every row is one new token."""
    masks: Sequence[AttentionMask | None] | None = None
    """The attention mask of every row; a row without one is causal, and so are all rows if this is None."""

    def equal_length_runs(self) -> Iterator[tuple[int, AttentionMask | None, int]]:
        """Adjacent rows that one attention call takes: their length, their mask, and how many they are."""
        if self.masks is None:
            yield from ((length, None, len(list(run))) for length, run in groupby(self.lengths))
        else:
            yield from ((length, mask, 1) for length, mask in zip(self.lengths, self.masks, strict=True))


class BlockKVCache:
    """One block's keys and values for the rows that run it, padded to the longest with room for new tokens."""

    def __init__(self, rows: Sequence[KeysValues], room: int):
        self.lengths = torch.tensor([keys.shape[1] for keys, _ in rows])
        capacity = int(self.lengths.max()) + room
        self.keys, self.values = (
            torch.stack([pad(row[part], (0, 0, 0, capacity - row[part].shape[1])) for row in rows]) for part in (0, 1)
        )

    def append(self, keys: Float[Tensor, "rows heads width"], values: Float[Tensor, "rows heads width"]) -> None:
        rows = torch.arange(len(self.lengths))
        self.keys[rows, :, self.lengths], self.values[rows, :, self.lengths] = keys, values
        self.lengths = self.lengths + 1

    def mask(self) -> Bool[Tensor, "rows 1 1 capacity"]:
        """Which positions hold a token."""
        return (torch.arange(self.keys.shape[2]) < self.lengths[:, None])[:, None, None].to(self.keys.device)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        index = torch.tensor(rows)
        self.lengths, self.keys, self.values = self.lengths[index], self.keys[index], self.values[index]


_packing: ContextVar[PackedRows | None] = ContextVar("packing", default=None)


@contextmanager
def packed_rows(packing: PackedRows) -> Iterator[None]:
    """The layout of the sequence that blocks are called with inside this context."""
    token = _packing.set(packing)
    try:
        yield
    finally:
        _packing.reset(token)


def current_packing() -> PackedRows:
    packing = _packing.get()
    assert packing is not None, f"{NAME} works only inside packed_rows()"
    return packing


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens width"],
    key: Float[Tensor, "1 kv_heads tokens width"],
    value: Float[Tensor, "1 kv_heads tokens width"],
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention of each row to itself; adjacent rows of equal length in one call."""
    packing = current_packing()
    _check_supported_attention(more, packing)
    grouped = key.shape[1] != query.shape[1]
    if packing.past is not None:
        packing.past.append(key[0].transpose(0, 1), value[0].transpose(0, 1))
        one_query = query[0].transpose(0, 1)[:, :, None]
        attended = scaled_dot_product_attention(
            one_query,
            packing.past.keys,
            packing.past.values,
            attn_mask=packing.past.mask(),
            scale=scaling,
            enable_gqa=grouped,
        )
        return attended[:, :, 0].flatten(1)[None].view(1, -1, *query.shape[1::2]), None
    result, start = torch.empty_like(query.transpose(1, 2)), 0
    for length, mask, count in packing.equal_length_runs():
        run = slice(start, start + count * length)
        q, k, v = (states[0, :, run].unflatten(1, (count, length)).transpose(0, 1) for states in (query, key, value))
        attended = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
        result[0, run] = attended.transpose(1, 2).flatten(0, 1)
        start = run.stop
    return result, None


def _check_supported_attention(options: dict[str, Any], packing: PackedRows) -> None:
    """Refuse attention that is more than causal: the answers would not be the model's."""
    longest = max(packing.lengths) if packing.past is None else int(packing.past.lengths.max()) + 1
    window = options.get("sliding_window")
    if window is not None and longest > window:
        raise UserError(
            f"A prompt of {longest} tokens is longer than this model's sliding window of {window}, which the executor"
            " does not support. Offer coarser tiers, or ask shorter questions."
        )
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise UserError(
                f"This model's attention uses {name}, which the executor does not support. Take another model."
            )


def per_row_top_k_experts(
    self: Any,
    hidden: Float[Tensor, "tokens width"],
    top_k_index: Int64[Tensor, "tokens k"],
    top_k_weights: Float[Tensor, "tokens k"],
) -> Float[Tensor, "tokens width"]:
    """Only the token-expert pairs of each token's own top-k, expert by expert on contiguous rows.

    The router has sorted its choices, so a smaller k keeps the first ones. Weights that the model renormalizes are
    renormalized over the kept ones.
    """
    packing = current_packing()
    kept = torch.arange(top_k_index.shape[1], device=hidden.device) < packing.top_k[:, None].to(hidden.device)
    if getattr(self, "groupwise_renormalize", False):
        kept_weights = top_k_weights * kept
        top_k_weights = kept_weights / kept_weights.sum(1, keepdim=True)
    pairs = kept.flatten().nonzero()[:, 0]
    packing.counter.expert_pairs += len(pairs)
    token, expert = pairs // kept.shape[1], top_k_index.flatten()[pairs]
    order = expert.argsort(stable=True)
    counts = torch.bincount(expert, minlength=self.num_experts)
    gate, up = _grouped_linear(hidden.index_select(0, token[order]), self.gate_up_proj, counts).chunk(2, dim=-1)
    outputs = _grouped_linear(self.act_fn(gate).mul_(up), self.down_proj, counts)
    # The weighted sum over each token's pairs: one pass, where a scatter would take three.
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = kept.sum(1).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    weights = top_k_weights.flatten()[pairs].to(outputs.dtype)
    return embedding_bag(rank, outputs, starts, mode="sum", per_sample_weights=weights)


def _grouped_linear(
    rows: Float[Tensor, "pairs width"], weights: Float[Tensor, "experts out width"], counts: Int64[Tensor, " experts"]
) -> Float[Tensor, "pairs out"]:
    """Each run of rows times the weights of its expert, in one call where torch supports it."""
    if _can_group(rows, weights):
        return grouped_mm(rows, weights.transpose(-2, -1), offs=counts.cumsum(0).int())
    parts = rows.split(counts.tolist())
    return torch.cat([linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


def _can_group(rows: Tensor, weights: Tensor) -> bool:
    """torch's grouped_mm takes few dtypes, and rows that begin at multiples of 16 bytes."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if rows.device.type == "cpu" else (torch.bfloat16,)
    aligned = all(width * rows.element_size() % 16 == 0 for width in weights.shape[1:])
    return rows.dtype in dtypes and aligned


AttentionInterface.register(NAME, packed_attention)
ALL_EXPERTS_FUNCTIONS.register(NAME, per_row_top_k_experts)


class BlockRunner:
    """Calls transformers' own blocks on packed rows, and counts the calls."""

    def __init__(self, adapter: ModelAdapter):
        self.adapter = adapter
        self._rotary_cache: tuple[list[Tensor], Rotary] | None = None

    def run(
        self,
        block: int,
        rows: Sequence[Float[Tensor, "_ width"]],
        position_ids: Sequence[Int64[Tensor, "axes _"]],
        top_ks: Sequence[int],
        counter: WorkCounter,
        *,
        is_last_block: Sequence[bool] | None = None,
        masks: Sequence[AttentionMask | None] | None = None,
    ) -> tuple[list[Tensor], list[KeysValues]]:
        """One block on whole prompts, each with its own top-k: new states, and new keys and values.

        Where this is a row's last block only its last token goes through experts, since only that state is read; the
        other states of the row are not valid. Its keys and values are complete.
        """
        lengths = tuple(len(row) for row in rows)
        last = torch.tensor(lengths).cumsum(0) - 1
        is_last = is_last_block or [False] * len(rows)
        others = torch.tensor([0 if ends else top_k for top_k, ends in zip(top_ks, is_last, strict=True)])
        top_k = others.repeat_interleave(torch.tensor(lengths)).index_copy(0, last, torch.tensor(top_ks))
        packing, recorder = PackedRows(lengths, top_k, counter, masks=masks), _KVRecorder()
        output = self._call(block, torch.cat(list(rows)), self._rotary(position_ids), packing, recorder)
        keys, values = recorder.keys[0].split(lengths, dim=1), recorder.values[0].split(lengths, dim=1)
        return list(output.split(lengths)), list(zip(keys, values, strict=True))

    def step(
        self, block: int, hidden: Float[Tensor, "rows width"], positions: Sequence[int], packing: PackedRows
    ) -> Float[Tensor, "rows width"]:
        """One block on one new token of each row, which attends to the row's KV cache."""
        return self._call(block, hidden, self.adapter.rotary(torch.tensor([positions])), packing, None)

    def _rotary(self, position_ids: Sequence[Tensor]) -> Rotary:
        """Consecutive blocks mostly run the same rows, so the last result is cached."""
        if self._rotary_cache is not None:
            cached, rotary = self._rotary_cache
            if len(cached) == len(position_ids) and all(map(is_, cached, position_ids)):
                return rotary
        self._rotary_cache = list(position_ids), self.adapter.rotary(torch.cat(list(position_ids), dim=1))
        return self._rotary_cache[1]

    def _call(self, block: int, hidden: Tensor, rotary: Rotary, packing: PackedRows, recorder: Any) -> Tensor:
        packing.counter.block_rows += len(packing.lengths)
        with packed_rows(packing):
            output = self.adapter.blocks[block](
                hidden[None],
                position_embeddings=rotary,
                attention_mask=None,
                past_key_values=recorder,
            )
        return (output if isinstance(output, Tensor) else output[0])[0]

    @contextmanager
    def patched(self) -> Iterator[None]:
        """The model's blocks use the packed attention and experts inside this context, and their own again after."""
        config = self.adapter.text_config
        before = config._attn_implementation, config._experts_implementation
        config._attn_implementation = config._experts_implementation = NAME
        try:
            yield
        finally:
            config._attn_implementation, config._experts_implementation = before


class _KVRecorder:
    """Stands in for a KV cache: returns keys and values unchanged, and records them."""

    keys: Tensor
    values: Tensor

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values
        return keys, values
