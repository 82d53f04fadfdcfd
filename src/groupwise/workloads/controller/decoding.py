"""Token after token for rows whose depth and top-k differ; a row leaves when it is finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.workloads.controller.blocks import Blocks, KeysValues
from groupwise.workloads.controller.packed import Packing, Past, Tally


@dataclass
class Row:
    """One answer in the making."""

    path: tuple[int, ...]
    """The top-k of every block; 0 where it does not run."""
    first_place: int
    """The rotary position of its first token."""
    keys_values: Sequence[KeysValues | None]
    """What every block has kept of the prompt; None where it did not run."""
    tokens: list[int]
    """So far; the first came from the prompt itself."""

    @property
    def next_place(self) -> int:
        return self.first_place + len(self.tokens) - 1


@dataclass
class _Cache:
    """One block's rows, and their keys and values."""

    rows: list[Row]
    past: Past


def decode(blocks: Blocks, rows: Sequence[Row], *, new_tokens: int, stop_token: int | None, tally: Tally) -> None:
    """Append tokens to every row, up to `new_tokens` more or its stop token. n tokens in all take n - 1 steps."""
    live = [row for row in rows if row.tokens[-1] != stop_token]
    caches = _caches(live, new_tokens) if live and new_tokens else {}
    for _ in range(new_tokens):
        if not live:
            return
        hidden = _step(blocks, live, caches, tally)
        for row, token in zip(live, blocks.adapter.logits(hidden).argmax(-1).tolist(), strict=True):
            row.tokens.append(token)
        live = [row for row in live if row.tokens[-1] != stop_token]
        _let_go(caches, live)


def _caches(rows: Sequence[Row], room: int) -> dict[int, _Cache]:
    """For every block that still has work, the rows it runs on."""
    caches = {}
    for block in range(len(rows[0].path)):
        here = [row for row in rows if row.path[block]]
        kept = [row.keys_values[block] for row in here]
        if here:
            caches[block] = _Cache(here, Past([pair for pair in kept if pair is not None], room))
    return caches


def _step(blocks: Blocks, live: Sequence[Row], caches: dict[int, _Cache], tally: Tally) -> Tensor:
    hidden = blocks.adapter.embed(torch.tensor([row.tokens[-1] for row in live]))
    place = {id(row): nth for nth, row in enumerate(live)}
    for block, cache in caches.items():
        here = torch.tensor([place[id(row)] for row in cache.rows])
        top_k = torch.tensor([row.path[block] for row in cache.rows])
        packing = Packing((1,) * len(cache.rows), top_k, tally, cache.past)
        hidden[here] = blocks.step(block, hidden[here], [row.next_place for row in cache.rows], packing)
    return hidden


def _let_go(caches: dict[int, _Cache], live: Sequence[Row]) -> None:
    """Finished rows leave; a block without rows is not called any more."""
    staying_ids = {id(row) for row in live}
    for block, cache in list(caches.items()):
        staying = [nth for nth, row in enumerate(cache.rows) if id(row) in staying_ids]
        if not staying:
            del caches[block]
        elif len(staying) < len(cache.rows):
            cache.past.keep(staying)
            cache.rows = [cache.rows[nth] for nth in staying]
