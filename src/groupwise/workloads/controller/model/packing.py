"""Rows of different length, depth and top-k through transformers' own blocks, without padding.

Rows are packed into one sequence. Two functions, registered through transformers' own interfaces, keep them apart: the
attention stays inside a row, and the experts compute only the token-expert pairs of each row's top-k.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import groupby
from operator import is_
from typing import Any

import torch
from jaxtyping import Bool, Float, Int32, Int64, Shaped
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import ModelAdapter
from groupwise.workloads.controller.model.adapters.base import Rotary
from groupwise.workloads.controller.model.knobs import WorkCounts

NAME = "groupwise_packed"

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


class RowLayout:
    """Lengths of packed rows and the token-expert pairs of their top-k: the same for all blocks that run them so."""

    def __init__(self, lengths: tuple[int, ...], top_ks: tuple[int, ...], is_last_block: tuple[bool, ...]):
        self.lengths, self.longest = lengths, max(lengths)
        self.equal_length_runs = [(length, len(list(run))) for length, run in groupby(lengths)]
        self._top_ks, self._is_last_block = top_ks, is_last_block
        self._pairs: dict[tuple[int, torch.device], ExpertPairs] = {}

    def pairs(self, columns: int, device: torch.device) -> ExpertPairs:
        """Of a router that returns `columns` experts per token, the best first."""
        if (columns, device) not in self._pairs:
            self._pairs[columns, device] = ExpertPairs(self._top_k(), columns, device)
        return self._pairs[columns, device]

    def _top_k(self) -> Int64[Tensor, " tokens"]:
        """The top-k of each token: 0 for one whose state is not read any more, those before the end of a last block."""
        lengths, top_ks = torch.tensor(self.lengths), torch.tensor(self._top_ks)
        others = top_ks.where(~torch.tensor(self._is_last_block), 0)
        return others.repeat_interleave(lengths).index_copy(0, lengths.cumsum(0) - 1, top_ks)


class ExpertPairs:
    """Which of a router's choices are computed."""

    def __init__(self, top_k: Int64[Tensor, " tokens"], columns: int, device: torch.device):
        kept = torch.arange(columns) < top_k[:, None]
        pairs = kept.flatten().nonzero()[:, 0]
        counts = top_k.clamp(max=columns)
        self.kept: Bool[Tensor, "tokens columns"] = kept.to(device)
        self.index: Int64[Tensor, " pairs"] | None = None if kept.all() else pairs.to(device)
        """Of the flattened choices; None if all of them are computed."""
        self.token = (pairs // columns).to(device)
        self.starts = (counts.cumsum(0) - counts).to(device)
        """The first pair of each token."""
        self.arange = torch.arange(len(pairs), device=device)

    def __len__(self) -> int:
        return len(self.token)

    def select(self, choices: Shaped[Tensor, "tokens columns"]) -> Shaped[Tensor, " pairs"]:
        flat = choices.flatten()
        return flat if self.index is None else flat.index_select(0, self.index)


# A layout of one row is small and comes again with the next request of its length; those of some rows are kept only
# from block to block, and of those of a large batch, which take as much memory as its hidden states, only the last.
_layout_of_one = lru_cache(maxsize=256)(RowLayout)
_layout_of_some = lru_cache(maxsize=4)(RowLayout)
_layout_of_batch = lru_cache(maxsize=1)(RowLayout)
_BATCH_ROWS = 16


def row_layout(
    lengths: tuple[int, ...], top_ks: tuple[int, ...], is_last_block: tuple[bool, ...] | None = None
) -> RowLayout:
    cached = _layout_of_one if len(lengths) == 1 else _layout_of_some
    if len(lengths) >= _BATCH_ROWS:
        cached = _layout_of_batch
    return cached(lengths, top_ks, is_last_block or (False,) * len(lengths))


def release_layouts() -> None:
    """Forget the last batch's, once it is answered."""
    _layout_of_batch.cache_clear()


@dataclass(slots=True)
class PackedRows:
    """The packed sequence that a block is called with."""

    layout: RowLayout
    counter: WorkCounter
    past: BlockKVCache | None = None
    """Keys and values of earlier tokens, when every row is one new token."""
    masks: Sequence[AttentionMask | None] | None = None
    """The attention mask of every row; a row without one is causal, and so are all rows if this is None."""
    keep_keys_values: bool = False
    keys_values: tuple[Float[Tensor, "1 heads tokens width"], Float[Tensor, "1 heads tokens width"]] | None = None
    """What the attention was called with, if it is to be kept."""

    @property
    def longest(self) -> int:
        return self.layout.longest if self.past is None else int(self.past.lengths.max()) + 1

    def attention_calls(self) -> Iterable[tuple[int, int, AttentionMask | None]]:
        """Adjacent rows that one attention call takes: their length, how many they are, and their mask."""
        if self.masks is None:
            return ((length, count, None) for length, count in self.layout.equal_length_runs)
        return ((length, 1, mask) for length, mask in zip(self.layout.lengths, self.masks, strict=True))

    def split_keys_values(self) -> list[KeysValues]:
        """Those of each row."""
        if self.keys_values is None:
            raise UserError(
                "A block of this model has no attention that transformers' attention interface calls: it may be"
                " recurrent, which the executor does not support. Take another model."
            )
        (keys,), (values,) = self.keys_values
        if len(self.layout.lengths) == 1:
            return [(keys, values)]
        lengths = self.layout.lengths
        return list(zip(keys.split(lengths, dim=1), values.split(lengths, dim=1), strict=True))


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
    """What a block is called with inside this context."""
    outer = _packing.set(packing)
    try:
        yield
    finally:
        _packing.reset(outer)


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
    if packing.keep_keys_values:
        packing.keys_values = key, value
    parts, start = [], 0
    for length, count, mask in packing.attention_calls():
        q, k, v = (_rows_of_run(states, start, count, length) for states in (query, key, value))
        attended = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        ).transpose(1, 2)
        parts.append(attended if count == 1 else attended.flatten(0, 1)[None])
        start += count * length
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), None


def _rows_of_run(
    states: Float[Tensor, "1 heads tokens width"], start: int, count: int, length: int
) -> Float[Tensor, "count heads length width"]:
    if count == 1:
        return states if length == states.shape[2] else states[:, :, start : start + length]
    return states[0, :, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1)


def _check_supported_attention(options: dict[str, Any], packing: PackedRows) -> None:
    """Refuse attention that is more than causal: the answers would not be the model's."""
    window = options.get("sliding_window")
    if window is not None and (longest := packing.longest) > window:
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

    A smaller k keeps the best choices, by the rule that `router_rule` has found for this router.
    """
    packing, rule = current_packing(), self.groupwise_rule
    pairs = packing.layout.pairs(top_k_index.shape[1], hidden.device)
    packing.counter.expert_pairs += len(pairs)
    if rule is not None and pairs.index is not None:
        if rule.sorts:
            top_k_weights, ranks = top_k_weights.sort(dim=1, descending=True, stable=True)
            top_k_index = top_k_index.gather(1, ranks)
        top_k_weights = rule.reduce(top_k_weights, pairs.kept)
    expert, order = pairs.select(top_k_index).sort(stable=True)
    ends = torch.searchsorted(expert, _arange(self.num_experts, hidden.device), right=True, out_int32=True)
    runs = _Runs(ends)
    # No more than two of the products' inputs and outputs are held at a time: they are the peak of a rollout.
    inputs = hidden.index_select(0, pairs.token.index_select(0, order))
    gate_and_up = _grouped_linear(inputs, self.gate_up_proj, runs)
    del inputs
    gate, up = gate_and_up.chunk(2, dim=-1)
    activated = self.act_fn(gate).mul_(up)
    del gate_and_up, gate, up
    outputs = _grouped_linear(activated, self.down_proj, runs)
    del activated
    # The weighted sum over each token's pairs: one pass, where a scatter would take three.
    rank = torch.empty_like(order).scatter_(0, order, pairs.arange)
    weights = pairs.select(top_k_weights).to(outputs.dtype)
    total, *_ = torch.embedding_bag(outputs, rank, pairs.starts, per_sample_weights=weights)
    return total


@lru_cache(maxsize=8)
def _arange(end: int, device: torch.device) -> Int64[Tensor, " end"]:
    return torch.arange(end, device=device)


@dataclass(frozen=True)
class _Runs:
    """Where the rows of each expert end."""

    ends: Int32[Tensor, " experts"]

    @cached_property
    def splits(self) -> Int64[Tensor, " experts"]:
        """On the host, copied once for both products."""
        return self.ends[:-1].cpu().long()


def _grouped_linear(
    rows: Float[Tensor, "pairs width"], weights: Float[Tensor, "experts out width"], runs: _Runs
) -> Float[Tensor, "pairs out"]:
    """Each run of rows times the weights of its expert, in one call where torch supports it."""
    if _can_group(rows.device.type, rows.dtype, weights.shape[1:]):
        return grouped_mm(rows, weights.transpose(-2, -1), offs=runs.ends)
    outputs = rows.new_empty(len(rows), weights.shape[1])  # written in parts: joining them would take it twice
    parts = zip(rows.tensor_split(runs.splits), weights, outputs.tensor_split(runs.splits), strict=True)
    for part, weight, output in parts:
        torch.mm(part, weight.t(), out=output)
    return outputs


@cache
def _can_group(device_type: str, dtype: torch.dtype, widths: tuple[int, ...]) -> bool:
    """torch's grouped_mm takes few dtypes, and rows that begin at multiples of 16 bytes."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if device_type == "cpu" else (torch.bfloat16,)
    return dtype in dtypes and all(width * dtype.itemsize % 16 == 0 for width in widths)


AttentionInterface.register(NAME, packed_attention)
ALL_EXPERTS_FUNCTIONS.register(NAME, per_row_top_k_experts)


class BlockRunner:
    """Calls transformers' own blocks on packed rows, and counts the calls.

    The blocks are copies that share the model's weights and have a configuration of their own, which names the packed
    attention and experts. So the model itself is never changed, and several threads may run it in either way.
    """

    def __init__(self, adapter: ModelAdapter):
        self.adapter = adapter
        self._blocks = _copies_with_shared_weights(adapter)
        self._layer_types = list(adapter.rotary_layer_types)
        self._last_rotary: dict[str | None, tuple[Sequence[Tensor], Rotary]] = {}
        self._rotary_of_one = lru_cache(maxsize=64)(self._compute_rotary)

    def run(
        self,
        block: int,
        rows: Sequence[Float[Tensor, "_ width"]],
        position_ids: Sequence[Int64[Tensor, "axes _"]],
        layout: RowLayout,
        counter: WorkCounter,
        *,
        masks: Sequence[AttentionMask | None] | None = None,
        keep_keys_values: bool = True,
    ) -> tuple[Sequence[Tensor], Sequence[KeysValues]]:
        """One block on whole prompts: new states, and new keys and values if they are to be kept.

        Where this is a row's last block only its last token goes through experts, since only that state is read; the
        other states of the row are not valid. Its keys and values are complete.
        """
        packing = PackedRows(layout, counter, masks=masks, keep_keys_values=keep_keys_values)
        packed = rows[0] if len(rows) == 1 else torch.cat(list(rows))
        output = self._call(block, packed, self._rotary(block, position_ids, packed), packing)
        states = (output,) if len(rows) == 1 else output.split(layout.lengths)
        return states, packing.split_keys_values() if keep_keys_values else ()

    def step(
        self, block: int, hidden: Float[Tensor, "rows width"], positions: Sequence[int], packing: PackedRows
    ) -> Float[Tensor, "rows width"]:
        """One block on one new token of each row, which attends to the row's KV cache."""
        return self._call(block, hidden, self._rotary(block, [torch.tensor([positions])], hidden), packing)

    def _rotary(self, block: int, position_ids: Sequence[Int64[Tensor, "axes _"]], hidden: Tensor) -> Rotary:
        """Consecutive blocks mostly run the same rows; and one row's positions come again with the next request."""
        layer_type, last = self._layer_types[block], self._last_rotary.get(self._layer_types[block])
        if last is not None and len(last[0]) == len(position_ids) and all(map(is_, last[0], position_ids)):
            return last[1]
        if len(position_ids) == 1:
            ids = position_ids[0]
            rotary = self._rotary_of_one(ids.numpy().tobytes(), len(ids), layer_type, hidden.dtype, hidden.device)
        else:
            rotary = self.adapter.rotary(torch.cat(list(position_ids), dim=1), layer_type)
        self._last_rotary[layer_type] = tuple(position_ids), rotary
        return rotary

    def _compute_rotary(self, position_ids: bytes, axes: int, layer_type: str | None, *_: object) -> Rotary:
        """Cached also by dtype and device, which the model may change."""
        ids = torch.frombuffer(bytearray(position_ids), dtype=torch.int64).view(axes, -1)
        return self.adapter.rotary(ids, layer_type)

    def _call(self, block: int, hidden: Tensor, rotary: Rotary, packing: PackedRows) -> Tensor:
        packing.counter.block_rows += len(packing.layout.lengths)
        with packed_rows(packing):
            output = self._blocks[block](hidden[None], position_embeddings=rotary, attention_mask=None)
        return (output if isinstance(output, Tensor) else output[0])[0]


def _copies_with_shared_weights(adapter: ModelAdapter) -> list[nn.Module]:
    """Forward hooks are shared, too: those registered on the model's blocks are called."""
    config = copy(adapter.text_config)
    config._attn_implementation = config._experts_implementation = NAME
    shared: dict[int, Any] = {id(adapter.text_config): config}
    for module in adapter.blocks.modules():
        hooks = [value for name, value in vars(module).items() if name.startswith("_forward_")]
        shared |= {id(kept): kept for kept in (*module.parameters(False), *module.buffers(False), *hooks)}
    return [deepcopy(block, shared) for block in adapter.blocks]
