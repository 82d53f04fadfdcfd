"""Rows of any order as a table with one line a group. Siblings are found by id, never by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Where each row stands in a [groups, members] table."""

    line: Int64[Tensor, " rows"]
    place: Int64[Tensor, " rows"]
    count: int
    widest: int

    @staticmethod
    def of(group_ids: Int64[Tensor, " rows"]) -> Groups:
        _, line, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
        by_line = torch.argsort(line, stable=True)
        starts = torch.cumsum(sizes, 0) - sizes
        place = torch.empty_like(line)
        place[by_line] = torch.arange(len(line), device=line.device) - starts[line[by_line]]
        return Groups(line, place, len(sizes), int(sizes.max()) if len(sizes) else 0)

    def table(self, values: Float[Tensor, " rows"], *, fill: float = torch.nan) -> Float[Tensor, "groups members"]:
        """The values by group; `fill` where a group has fewer members than the widest."""
        empty = torch.full((self.count, self.widest), fill, dtype=values.dtype, device=values.device)
        return empty.index_put((self.line, self.place), values)

    def rows(self, table: Shaped[Tensor, "groups members"]) -> Shaped[Tensor, " rows"]:
        """Back to one value a row, in the rows' own order."""
        return table[self.line, self.place]
