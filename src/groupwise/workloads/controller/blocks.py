"""A model's blocks, one at a time, on rows of any length and top-k."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.workloads.controller.adapter import Adapter
from groupwise.workloads.controller.packed import NAME, Packing, Tally, packed

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of packed tokens."""
KeysValues = tuple[Float[Tensor, "heads tokens width"], Float[Tensor, "heads tokens width"]]


class Blocks:
    """Calls transformers' own blocks on packed rows, and counts what it calls."""

    def __init__(self, adapter: Adapter):
        self.adapter = adapter
        self._placed: tuple[list[Tensor], Rotary] | None = None

    def run(
        self,
        block: int,
        rows: Sequence[Float[Tensor, "_ width"]],
        places: Sequence[Int64[Tensor, "axes _"]],
        top_ks: Sequence[int],
        tally: Tally,
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
        packing, record = Packing(lengths, top_k, tally, visible=visible), _Record()
        output = self._call(block, torch.cat(list(rows)), self._rotary(places), packing, record)
        keys, values = record.keys[0].split(lengths, dim=1), record.values[0].split(lengths, dim=1)
        return list(output.split(lengths)), list(zip(keys, values, strict=True))

    def step(
        self, block: int, hidden: Float[Tensor, "rows width"], places: Sequence[int], packing: Packing
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

    def _call(self, block: int, hidden: Tensor, rotary: Rotary, packing: Packing, record: Any) -> Tensor:
        packing.tally.block_rows += len(packing.lengths)
        with packed(packing):
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


class _Record:
    """Takes the place of a cache: hands keys and values on as they are, and keeps them."""

    keys: Tensor
    values: Tensor

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values
        return keys, values
