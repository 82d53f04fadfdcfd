"""The knobs of a multimodal model's inference, and the work that each setting stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from groupwise.core.errors import UserError


@dataclass(frozen=True, order=True)
class Knobs:
    """One way to answer."""

    tier: str
    """How finely the image is cut."""
    insertion_position: int
    """Blocks that run in full before the second choice is made."""
    top_k: int
    """Experts per token in the blocks from the insertion position on."""
    blocks: int
    """Blocks that run in total."""


@dataclass(frozen=True)
class KnobOptions:
    """What can be chosen for one model."""

    crops: Mapping[str, int]
    """Tiers from coarse to fine, each with its number of crops besides the overview."""
    total_blocks: int
    full_top_k: int
    drop_order: Sequence[int]
    """Blocks in the order in which they are given up, the least important first."""
    insertion_positions: Sequence[int] = (1, 2, 3, 4, 5)
    most_dropped: int = 4
    smallest_top_k: int = 4

    @property
    def top_ks(self) -> range:
        return range(self.smallest_top_k, self.full_top_k + 1)

    @property
    def block_totals(self) -> range:
        """The same totals for every insertion position."""
        return range(self.total_blocks - self.most_dropped, self.total_blocks + 1)

    @property
    def full(self) -> Knobs:
        return Knobs(list(self.crops)[-1], self.insertion_positions[0], self.full_top_k, self.total_blocks)

    @property
    def cheapest(self) -> Knobs:
        return Knobs(next(iter(self.crops)), self.insertion_positions[0], self.smallest_top_k, self.block_totals[0])

    def all(self) -> Iterator[Knobs]:
        for values in product(self.crops, self.insertion_positions, self.top_ks, self.block_totals):
            yield Knobs(*values)

    def check(self, knobs: Knobs) -> None:
        """Refuse a setting that the model does not offer."""
        allowed: dict[str, Sequence[object]] = {
            "tier": list(self.crops),
            "insertion_position": list(self.insertion_positions),
            "top_k": list(self.top_ks),
            "blocks": list(self.block_totals),
        }
        for name, options in allowed.items():
            if getattr(knobs, name) not in options:
                raise UserError(
                    f"{name} is {getattr(knobs, name)!r}: this model offers {', '.join(map(str, options))}."
                )

    def path(self, knobs: Knobs) -> tuple[int, ...]:
        """The top-k of every block in turn; 0 for a block that does not run."""
        droppable = [block for block in self.drop_order if block >= knobs.insertion_position]
        dropped = set(droppable[: self.total_blocks - knobs.blocks])
        return tuple(
            0 if block in dropped else self.full_top_k if block < knobs.insertion_position else knobs.top_k
            for block in range(self.total_blocks)
        )


@dataclass(frozen=True)
class Work:
    """What was executed, counted."""

    crops: int = 0
    """Crops through the vision tower."""
    block_rows: int = 0
    """Rows through a block, summed over blocks."""
    expert_pairs: int = 0
    """Token-expert pairs that were computed."""

    def __add__(self, other: Work) -> Work:
        return Work(
            self.crops + other.crops, self.block_rows + other.block_rows, self.expert_pairs + other.expert_pairs
        )


def work_of_answer(options: KnobOptions, knobs: Knobs, tokens: int) -> Work:
    """What one answer of one token costs when nothing is shared: `tokens` of prompt through its blocks."""
    path = options.path(knobs)
    return Work(1 + options.crops[knobs.tier], sum(k > 0 for k in path), tokens * sum(path))
