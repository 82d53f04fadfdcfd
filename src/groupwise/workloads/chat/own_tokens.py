"""Completions of like length side by side, for attention within each of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

ByToken = Shaped[Tensor, "tokens ..."]
ByRow = Shaped[Tensor, "rows ..."]


@dataclass(frozen=True, eq=False)
class OwnTokens:
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


def own_tokens(starts: Tensor, lengths: Tensor, device: torch.device) -> list[OwnTokens]:
    """Lines whose lengths have equally many binary digits share a table, so at most half of it are repeats."""
    digits = torch.tensor([int(length).bit_length() for length in lengths])
    return [
        _table(starts[digits == size], lengths[digits == size], device) for size in sorted({*digits.tolist()} - {0})
    ]


def _table(starts: Tensor, lengths: Tensor, device: torch.device) -> OwnTokens:
    places = torch.arange(int(lengths.max()))
    table = starts[:, None] + torch.minimum(places, lengths[:, None] - 1)
    real = (places < lengths[:, None]).flatten().nonzero().flatten()
    tokens = table.flatten()[real]
    first, count = int(tokens[0]), len(tokens)
    all_real = count == table.numel()
    if all_real and torch.equal(tokens, torch.arange(first, first + count)):
        return OwnTokens(table.to(device), slice(first, first + count), None)
    return OwnTokens(table.to(device), tokens.to(device), None if all_real else real.to(device))
