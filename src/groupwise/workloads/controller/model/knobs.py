"""The knobs of a multimodal model's inference, and the work that each setting stands for.
The knobs that a model can offer when nobody has said more than its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from groupwise.core.errors import UserError

if TYPE_CHECKING:
    from groupwise.workloads.controller.model.adapters import ModelAdapter


@dataclass(frozen=True, order=True)
class Knobs:
    """One way to answer."""

    tier: str
    """How finely the image is cut."""
    insertion_position: int
    """Blocks that run in full before the second choice is made."""
    top_k: int
    """Experts per token in the blocks from the insertion position on; 0 for a model without experts."""
    blocks: int
    """Blocks that run in total."""


@dataclass(frozen=True)
class KnobOptions:
    """What can be chosen for one model."""

    crops: Mapping[str, int]
    """Tiers from coarse to fine, each with its number of crops besides the overview."""
    total_blocks: int
    full_top_k: int
    """0 for a dense model, which has no top-k knob."""
    drop_order: Sequence[int]
    """Blocks in the order in which they are given up, the least important first."""
    insertion_positions: Sequence[int] = (1, 2, 3, 4, 5)
    most_dropped: int = 4
    smallest_top_k: int = 4
    dense_blocks: Sequence[int] = ()
    """Blocks without experts among others that have them."""
    pixels: Mapping[str, int] = field(default_factory=dict)
    """For a model that sees an image whole: how many pixels it has at each tier."""

    def __post_init__(self) -> None:
        latest = max(self.insertion_positions)
        spare = [block for block in self.drop_order if latest <= block < self.total_blocks]
        if len(spare) < self.most_dropped or latest > self.total_blocks:
            raise UserError(
                f"drop_order is {tuple(self.drop_order)}: from insertion position {latest} on it names {len(spare)} of"
                f" {self.total_blocks} blocks, and most_dropped is {self.most_dropped}. Name at least"
                f" {self.most_dropped} blocks there, or lower most_dropped or the insertion positions."
            )

    @property
    def top_ks(self) -> range:
        return range(min(self.smallest_top_k, self.full_top_k), self.full_top_k + 1)

    @property
    def block_totals(self) -> range:
        """The same totals for every insertion position."""
        return range(self.total_blocks - self.most_dropped, self.total_blocks + 1)

    @property
    def full(self) -> Knobs:
        return Knobs(list(self.crops)[-1], self.insertion_positions[0], self.full_top_k, self.total_blocks)

    @property
    def cheapest(self) -> Knobs:
        return Knobs(next(iter(self.crops)), self.insertion_positions[0], self.top_ks[0], self.block_totals[0])

    @property
    def choices(self) -> dict[str, Sequence[object]]:
        """The options of every knob."""
        return {
            "tier": list(self.crops),
            "insertion_position": list(self.insertion_positions),
            "top_k": list(self.top_ks),
            "blocks": list(self.block_totals),
        }

    @property
    def absent(self) -> dict[str, str]:
        """Knobs that this model cannot offer, each with the reason."""
        too_few = f"it has {self.total_blocks} blocks, too few to choose among"
        reasons = {
            "tier": "its images come in one size",
            "insertion_position": too_few,
            "top_k": "all its experts are needed" if self.full_top_k else "it is dense: it has no experts",
            "blocks": too_few,
        }
        return {name: reasons[name] for name, options in self.choices.items() if len(options) == 1}

    def all(self) -> Iterator[Knobs]:
        for values in product(self.crops, self.insertion_positions, self.top_ks, self.block_totals):
            yield Knobs(*values)

    def check(self, knobs: Knobs) -> None:
        """Refuse a setting that the model does not offer."""
        for name, options in self.choices.items():
            asked = getattr(knobs, name)
            if asked in options:
                continue
            if name in self.absent:
                raise UserError(
                    f"{name} is {asked!r}: this model cannot offer the {name} knob, since {self.absent[name]}. Leave it"
                    f" at {options[0]}."
                )
            raise UserError(f"{name} is {asked!r}: this model offers {', '.join(map(str, options))}.")

    def has_experts(self, block: int) -> bool:
        return self.full_top_k > 0 and block not in self.dense_blocks

    def path(self, knobs: Knobs) -> tuple[int, ...]:
        """The top-k of every block in turn: 0 for a block that does not run, 1 for one that runs without experts."""
        droppable = [block for block in self.drop_order if block >= knobs.insertion_position]
        dropped = set(droppable[: self.total_blocks - knobs.blocks])
        top_ks = [
            self.full_top_k if nth < knobs.insertion_position else knobs.top_k for nth in range(self.total_blocks)
        ]
        return tuple(
            0 if block in dropped else top_k if self.has_experts(block) else 1 for block, top_k in enumerate(top_ks)
        )


@dataclass(frozen=True)
class WorkCounts:
    """What was executed, counted."""

    crops: int = 0
    """Crops through the vision tower."""
    block_rows: int = 0
    """Rows through a block, summed over blocks."""
    expert_pairs: int = 0
    """Token-expert pairs that were computed."""
    patches: int = 0
    """Patches through the vision tower, where a tier is a number of pixels."""

    def __add__(self, other: WorkCounts) -> WorkCounts:
        return WorkCounts(
            self.crops + other.crops,
            self.block_rows + other.block_rows,
            self.expert_pairs + other.expert_pairs,
            self.patches + other.patches,
        )


def work_of_answer(options: KnobOptions, knobs: Knobs, tokens: int, patches: int = 0) -> WorkCounts:
    """What one answer of one token costs when nothing is shared: `tokens` of prompt through its blocks.

    In the last block that runs only the last token is taken to experts: nobody reads the others any more.
    """
    path = options.path(knobs)
    top_ks = [top_k if options.has_experts(block) else 0 for block, top_k in enumerate(path)]
    last = max(block for block, top_k in enumerate(path) if top_k)
    pairs = tokens * sum(top_ks) - (tokens - 1) * top_ks[last]
    return WorkCounts(1 + options.crops[knobs.tier], sum(k > 0 for k in path), pairs, patches)


_LATEST_INSERTION_POSITION = 5
# Measured on MolmoE, the model with 16 blocks in the field.
_REMOVED_FIRST_OF_16 = (4, 13, 10, 2)


def default_options(adapter: ModelAdapter, drop_order: Sequence[int] | None = None) -> KnobOptions:
    """Up to a quarter of the blocks may go, top-k down to half, the second choice after block 1 to 5, and the family's
    tiers. Without a measured `drop_order` it is guessed.
    """
    from groupwise.workloads.controller.model.adapters import dense_blocks, full_top_k

    total, top_k = len(adapter.blocks), full_top_k(adapter)
    latest = max(1, min(_LATEST_INSERTION_POSITION, total - 1 - total // 4))
    order = tuple(guessed_drop_order(total) if drop_order is None else drop_order)
    tiers = adapter.tiers()
    return KnobOptions(
        crops=tiers["crops"],
        total_blocks=total,
        full_top_k=top_k,
        drop_order=order,
        insertion_positions=tuple(range(1, latest + 1)),
        most_dropped=min(total // 4, sum(block >= latest for block in order)),
        smallest_top_k=(top_k + 1) // 2,
        dense_blocks=dense_blocks(adapter) if top_k else (),
        pixels=tiers.get("pixels", {}),
    )


def guessed_drop_order(total_blocks: int) -> list[int]:
    """A guess, to be replaced by a measurement on the model itself: what lies around two thirds of the depth goes
    first, the first and the last block never. With 16 blocks, MolmoE's measured order comes before the rest.
    """
    known = _REMOVED_FIRST_OF_16 if total_blocks == 16 else ()
    rest = [block for block in range(1, total_blocks - 1) if block not in known]
    return [*known, *sorted(rest, key=lambda block: abs(block - 2 * total_blocks / 3))]
