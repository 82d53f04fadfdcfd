"""Rows of different length, depth and top-k through transformers' own blocks, without padding.

Rows are laid end to end in one sequence. Two functions, registered through transformers' own interfaces, keep them
apart: the attention looks only inside a row, and the experts compute only the pairs that a row's top-k asks for.
A model's blocks, one at a time, on rows of any length and top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, grouped_mm, linear, pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import ModelAdapter

NAME = "groupwise_packed"


@dataclass
class WorkCounter:
    """Counts what really ran, where it runs."""

    block_rows: int = 0
    expert_pairs: int = 0


@dataclass(frozen=True)
class PackedRows:
    """How the rows lie in the packed sequence, and how many experts each token gets."""

    lengths: tuple[int, ...]
    top_k: Int64[Tensor, " tokens"]
    """0 for a token whose state nobody will read."""
    tally: WorkCounter
    past: BlockKVCache | None = None
    """Keys and values of earlier tokens, when every row is one new token."""
    visible: Sequence[Bool[Tensor, "_ _"]] | None = None
    """For every row, which tokens (down) see which (across); else all that came before."""

    def alike(self) -> Iterator[tuple[int, Tensor | None, int]]:
        """Runs of rows that attention can take together: their length, what they see, and how many they are."""
        if self.visible is not None:
            yield from ((length, visible, 1) for length, visible in zip(self.lengths, self.visible, strict=True))
        else:
            yield from ((length, None, len(list(equals))) for length, equals in groupby(self.lengths))


class BlockKVCache:
    """One block's keys and values for the rows that it runs on, padded to the longest with room for new tokens."""

    def __init__(self, rows: Sequence[tuple[Tensor, Tensor]], room: int):
        self.lengths = torch.tensor([keys.shape[1] for keys, _ in rows])
        widest = int(self.lengths.max()) + room
        self.keys, self.values = (
            torch.stack([pad(row[part], (0, 0, 0, widest - row[part].shape[1])) for row in rows]) for part in (0, 1)
        )

    def append(self, keys: Float[Tensor, "rows heads width"], values: Float[Tensor, "rows heads width"]) -> None:
        rows = torch.arange(len(self.lengths))
        self.keys[rows, :, self.lengths], self.values[rows, :, self.lengths] = keys, values
        self.lengths = self.lengths + 1

    def seen(self) -> Tensor:
        """Which places hold a token, [rows, 1, 1, widest]."""
        return (torch.arange(self.keys.shape[2]) < self.lengths[:, None])[:, None, None].to(self.keys.device)

    def keep(self, rows: Sequence[int]) -> None:
        """Finished rows leave."""
        chosen = torch.tensor(rows)
        self.lengths, self.keys, self.values = self.lengths[chosen], self.keys[chosen], self.values[chosen]


_packing: ContextVar[PackedRows | None] = ContextVar("packing", default=None)


@contextmanager
def packed_rows(packing: PackedRows) -> Iterator[None]:
    """The rows that the blocks called meanwhile hold."""
    token = _packing.set(packing)
    try:
        yield
    finally:
        _packing.reset(token)


def current_packing() -> PackedRows:
    packing = _packing.get()
    assert packing is not None, f"{NAME} works only inside packed()"
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
    """Causal attention of each row to itself; neighbours of equal length go together."""
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
            attn_mask=packing.past.seen(),
            scale=scaling,
            enable_gqa=grouped,
        )
        return attended[:, :, 0].flatten(1)[None].view(1, -1, *query.shape[1::2]), None
    result, start = torch.empty_like(query.transpose(1, 2)), 0
    for length, visible, count in packing.alike():
        part = slice(start, start + count * length)
        q, k, v = (states[0, :, part].unflatten(1, (count, length)).transpose(0, 1) for states in (query, key, value))
        attended = scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, scale=scaling, enable_gqa=grouped
        )
        result[0, part] = attended.transpose(1, 2).flatten(0, 1)
        start = part.stop
    return result, None


def _check_supported_attention(asked: dict[str, Any], packing: PackedRows) -> None:
    """Some models ask for more than causal attention: better no answer than another one than theirs."""
    longest = max(packing.lengths) if packing.past is None else int(packing.past.lengths.max()) + 1
    window = asked.get("sliding_window")
    if window is not None and longest > window:
        raise UserError(
            f"A prompt of {longest} tokens is longer than this model's sliding window of {window}, which the executor"
            " does not follow. Offer coarser tiers, or ask shorter questions."
        )
    for name in ("softcap", "s_aux"):
        if asked.get(name) is not None:
            raise UserError(
                f"This model's attention uses {name}, which the executor does not offer. Take another model."
            )


def per_row_top_k_experts(
    self: Any,
    hidden: Float[Tensor, "tokens width"],
    top_k_index: Int64[Tensor, "tokens k"],
    top_k_weights: Float[Tensor, "tokens k"],
) -> Float[Tensor, "tokens width"]:
    """Only the pairs that each token's own top-k asks for, expert by expert on contiguous rows.

    The router has sorted its choices, so a smaller k keeps the first ones. Weights that the model renormalizes are
    renormalized over what is kept.
    """
    packing = current_packing()
    wanted = torch.arange(top_k_index.shape[1], device=hidden.device) < packing.top_k[:, None].to(hidden.device)
    if getattr(self, "groupwise_renormalize", False):
        kept = top_k_weights * wanted
        top_k_weights = kept / kept.sum(1, keepdim=True)
    chosen = wanted.flatten().nonzero()[:, 0]
    packing.tally.expert_pairs += len(chosen)
    token, expert = chosen // wanted.shape[1], top_k_index.flatten()[chosen]
    order = expert.argsort(stable=True)
    counts = torch.bincount(expert, minlength=self.num_experts)
    gate, up = _grouped_linear(hidden.index_select(0, token[order]), self.gate_up_proj, counts).chunk(2, dim=-1)
    found = _grouped_linear(self.act_fn(gate).mul_(up), self.down_proj, counts)
    # The weighted sum of each token's pairs: one pass, where a scatter would take three.
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = wanted.sum(1).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    weights = top_k_weights.flatten()[chosen].to(found.dtype)
    return embedding_bag(places, found, starts, mode="sum", per_sample_weights=weights)


def _grouped_linear(
    rows: Float[Tensor, "pairs width"], weights: Float[Tensor, "experts out width"], counts: Int64[Tensor, " experts"]
) -> Float[Tensor, "pairs out"]:
    """Each run of rows times the weights of its expert: in one call where torch has one for it."""
    if _can_group(rows, weights):
        return grouped_mm(rows, weights.transpose(-2, -1), offs=counts.cumsum(0).int())
    parts = rows.split(counts.tolist())
    return torch.cat([linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


def _can_group(rows: Tensor, weights: Tensor) -> bool:
    """What torch's one call takes: few number formats, and rows that begin at multiples of 16 bytes."""
    offered = (torch.float32, torch.float16, torch.bfloat16) if rows.device.type == "cpu" else (torch.bfloat16,)
    aligned = all(width * rows.element_size() % 16 == 0 for width in weights.shape[1:])
    return rows.dtype in offered and aligned


AttentionInterface.register(NAME, packed_attention)
ALL_EXPERTS_FUNCTIONS.register(NAME, per_row_top_k_experts)


Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of packed tokens."""
KeysValues = tuple[Float[Tensor, "heads tokens width"], Float[Tensor, "heads tokens width"]]


class BlockRunner:
    """Calls transformers' own blocks on packed rows, and counts what it calls."""

    def __init__(self, adapter: ModelAdapter):
        self.adapter = adapter
        self._placed: tuple[list[Tensor], Rotary] | None = None

    def run(
        self,
        block: int,
        rows: Sequence[Float[Tensor, "_ width"]],
        places: Sequence[Int64[Tensor, "axes _"]],
        top_ks: Sequence[int],
        tally: WorkCounter,
        ending: Sequence[bool] | None = None,
        visible: Sequence[Tensor] | None = None,
    ) -> tuple[list[Tensor], list[KeysValues]]:
        """One block on whole prompts, each with its own top-k: new states, and the keys and values it has made.

        Of a row that is `ending` here only the last token's state is right: it alone says the answer, so it alone is
        taken to experts. Its keys and values are whole. `visible` as in `Packing`.
        """
        lengths = tuple(len(row) for row in rows)
        last = torch.tensor(lengths).cumsum(0) - 1
        before = torch.tensor([0 if ends else k for k, ends in zip(top_ks, ending or [False] * len(rows), strict=True)])
        top_k = before.repeat_interleave(torch.tensor(lengths)).index_copy(0, last, torch.tensor(top_ks))
        packing, record = PackedRows(lengths, top_k, tally, visible=visible), _KVRecorder()
        output = self._call(block, torch.cat(list(rows)), self._rotary(places), packing, record)
        keys, values = record.keys[0].split(lengths, dim=1), record.values[0].split(lengths, dim=1)
        return list(output.split(lengths)), list(zip(keys, values, strict=True))

    def step(
        self, block: int, hidden: Float[Tensor, "rows width"], places: Sequence[int], packing: PackedRows
    ) -> Float[Tensor, "rows width"]:
        """One block on one new token of each row, which attends to the row's past."""
        return self._call(block, hidden, self.adapter.rotary(torch.tensor([places])), packing, None)

    def _rotary(self, places: Sequence[Tensor]) -> Rotary:
        """Blocks mostly follow each other on the same rows, so the last ones are kept."""
        if self._placed is not None:
            kept, rotary = self._placed
            if len(kept) == len(places) and all(one is other for one, other in zip(kept, places, strict=True)):
                return rotary
        self._placed = list(places), self.adapter.rotary(torch.cat(list(places), dim=1))
        return self._placed[1]

    def _call(self, block: int, hidden: Tensor, rotary: Rotary, packing: PackedRows, record: Any) -> Tensor:
        packing.tally.block_rows += len(packing.lengths)
        with packed_rows(packing):
            output = self.adapter.blocks[block](
                hidden[None],
                position_embeddings=rotary,
                attention_mask=None,
                past_key_values=record,
            )
        return (output if isinstance(output, Tensor) else output[0])[0]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The model's blocks use the packed attention and experts meanwhile, and their own again afterwards."""
        config = self.adapter.text_config
        before = config._attn_implementation, config._experts_implementation
        config._attn_implementation = config._experts_implementation = NAME
        try:
            yield
        finally:
            config._attn_implementation, config._experts_implementation = before


class _KVRecorder:
    """Takes the place of a cache: hands keys and values on as they are, and keeps them."""

    keys: Tensor
    values: Tensor

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values
        return keys, values
