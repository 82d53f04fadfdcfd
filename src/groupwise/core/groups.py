"""Groups: ids made from a condition's content, the check that groups are whole, and rows <-> [groups, members] tables.

Members of a group are found by its id, which travels with the data, never by their position.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from groupwise.core.errors import UserError


@dataclass(frozen=True)
class Groups:
    """The place of each row in a [groups, members] table."""

    group_index: Int64[Tensor, " rows"]
    member_index: Int64[Tensor, " rows"]
    num_groups: int
    max_members: int

    @staticmethod
    def of(group_ids: Int64[Tensor, " rows"]) -> Groups:
        _, group_index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
        by_group = torch.argsort(group_index, stable=True)
        starts = torch.cumsum(sizes, 0) - sizes
        member_index = torch.empty_like(group_index)
        member_index[by_group] = (
            torch.arange(len(group_index), device=group_index.device) - starts[group_index[by_group]]
        )
        return Groups(group_index, member_index, len(sizes), int(sizes.max()) if len(sizes) else 0)

    def to_table(self, values: Float[Tensor, " rows"], *, fill: float = torch.nan) -> Float[Tensor, "groups members"]:
        """The values by group; `fill` where a group has fewer members than the largest."""
        empty = torch.full((self.num_groups, self.max_members), fill, dtype=values.dtype, device=values.device)
        return empty.index_put((self.group_index, self.member_index), values)

    def to_rows(self, table: Shaped[Tensor, "groups members"]) -> Shaped[Tensor, " rows"]:
        """One value per row again, in the order of the rows."""
        return table[self.group_index, self.member_index]


def group_id(condition: int, *content: object) -> int:
    """An int64 made from everything the condition consists of (strings, bytes, numbers, tensors, None), and its index.

    The index separates two equal dataset rows. The content reveals a condition that was drawn again for one of its
    members: that member's id differs, and `check_groups` raises.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (condition, *content):
        raw = _as_bytes(part)
        digest.update(f"{type(part).__name__}:{len(raw)}:".encode() + raw)
    return int.from_bytes(digest.digest(), "little", signed=True)


def content_hash(*parts: str | bytes | memoryview, digest_size: int = 16) -> str:
    """A name for content: a hash in hexadecimal of all parts, one after the other."""
    digest = hashlib.blake2b(digest_size=digest_size)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def check_groups(placed_groups: Int64[Tensor, " rollouts"], group_ids: Int64[Tensor, " rollouts"]) -> None:
    """Refuse rollouts whose group ids do not form the groups that were placed."""
    pairs = torch.unique(torch.stack([placed_groups, group_ids], dim=1), dim=0)
    groups, ids_per_group = torch.unique(pairs[:, 0], return_counts=True)
    if (ids_per_group > 1).any():
        broken = int(groups[ids_per_group > 1][0])
        raise UserError(
            f"The members of group {broken} do not share one condition: they carry {int(ids_per_group.max())} different"
            " ids. Build the whole condition from its dataset index alone, draw nothing per member, and pass all of its"
            " content to group_id()."
        )
    ids, groups_per_id = torch.unique(pairs[:, 1], return_counts=True)
    if (groups_per_id > 1).any():
        shared = int(ids[groups_per_id > 1][0])
        raise UserError(
            f"{int(groups_per_id.max())} groups carry the same id {shared}, so their members would be compared across"
            " conditions. Make ids with group_id(condition index, content ...)."
        )


def _as_bytes(part: object) -> bytes:
    if isinstance(part, bytes):
        return part
    if isinstance(part, Tensor):
        raw = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{part.dtype}{tuple(part.shape)}".encode() + raw.numpy().tobytes()
    if part is not None and not isinstance(part, str | int | float):
        raise UserError(
            f"group_id() was given {type(part).__name__}: it takes strings, bytes, numbers, tensors and None. Turn"
            " arrays into tensors and pass the entries of a list one by one."
        )
    return repr(part).encode()
