"""The knobs of a multimodal model's inference: one setting, all settings of a model, and the work of a setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

from groupwise.core.errors import UserError


@dataclass(frozen=True, order=True)
class Knobs:
    """One configuration of the model's inference."""

    tier: str
    """How finely the image is cropped."""
    insertion_position: int
    """Blocks that run in full before the controller's second stage decides."""
    top_k: int
    """Experts per token in the blocks from the insertion position on; 0 for a model without experts."""
    blocks: int
    """Blocks that run in total."""


@dataclass(frozen=True)
class KnobOptions:
    """The options of every knob of one model."""

    crops_by_tier: Mapping[str, int]
    """Tiers from coarse to fine, each with its number of crops besides the overview."""
    total_blocks: int
    full_top_k: int
    """0 for a dense model, which has no top-k knob."""
    drop_order: Sequence[int]
    """Blocks in the order in which they are dropped, the least important first."""
    insertion_positions: Sequence[int] = (1, 2, 3, 4, 5)
    max_dropped_blocks: int = 4
    smallest_top_k: int = 4
    dense_blocks: Sequence[int] = ()
    """Blocks without experts in a model whose other blocks have them."""
    pixels: Mapping[str, int] = field(default_factory=dict)
    """For a model that takes an image whole: its number of pixels at each tier."""

    def __post_init__(self) -> None:
        latest = max(self.insertion_positions)
        droppable = [block for block in self.drop_order if latest <= block < self.total_blocks]
        if len(droppable) < self.max_dropped_blocks or latest > self.total_blocks:
            raise UserError(
                f"drop_order is {tuple(self.drop_order)}: from insertion position {latest} on it names"
                f" {len(droppable)} of {self.total_blocks} blocks, and max_dropped_blocks is"
                f" {self.max_dropped_blocks}. Name at least {self.max_dropped_blocks} blocks there, or lower"
                " max_dropped_blocks or the insertion positions."
            )

    @property
    def top_ks(self) -> range:
        return range(min(self.smallest_top_k, self.full_top_k), self.full_top_k + 1)

    @property
    def block_totals(self) -> range:
        """The same totals for every insertion position."""
        return range(self.total_blocks - self.max_dropped_blocks, self.total_blocks + 1)

    @property
    def full(self) -> Knobs:
        return Knobs(list(self.crops_by_tier)[-1], self.insertion_positions[0], self.full_top_k, self.total_blocks)

    @property
    def cheapest(self) -> Knobs:
        return Knobs(next(iter(self.crops_by_tier)), self.insertion_positions[0], self.top_ks[0], self.block_totals[0])

    @property
    def choices(self) -> dict[str, Sequence[object]]:
        """The options of every knob, by its name."""
        return {
            "tier": list(self.crops_by_tier),
            "insertion_position": list(self.insertion_positions),
            "top_k": list(self.top_ks),
            "blocks": list(self.block_totals),
        }

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """How many tiers, insertion positions, top-ks and block totals there are: the shape of a table over them."""
        return len(self.crops_by_tier), len(self.insertion_positions), len(self.top_ks), len(self.block_totals)

    @property
    def unavailable(self) -> dict[str, str]:
        """Knobs that this model cannot offer, each with the reason."""
        too_few = f"it has {self.total_blocks} blocks, too few to choose among"
        reasons = {
            "tier": "its images come in one size",
            "insertion_position": too_few,
            "top_k": "all its experts are needed" if self.full_top_k else "it is dense: it has no experts",
            "blocks": too_few,
        }
        return {name: reasons[name] for name, options in self.choices.items() if len(options) == 1}

    def configurations(self) -> Iterator[Knobs]:
        """All configurations, in the order of a flattened table of `shape`."""
        for values in product(self.crops_by_tier, self.insertion_positions, self.top_ks, self.block_totals):
            yield Knobs(*values)

    def check(self, knobs: Knobs) -> None:
        """Refuse a configuration that the model does not offer."""
        for name, options in self.choices.items():
            value = getattr(knobs, name)
            if value in options:
                continue
            if name in self.unavailable:
                raise UserError(
                    f"{name} is {value!r}: this model cannot offer the {name} knob, since {self.unavailable[name]}."
                    f" Leave it at {options[0]}."
                )
            raise UserError(f"{name} is {value!r}: this model offers {', '.join(map(str, options))}.")

    def has_experts(self, block: int) -> bool:
        return self.full_top_k > 0 and block not in self.dense_blocks

    def block_path(self, knobs: Knobs) -> tuple[int, ...]:
        """The top-k of every block in turn: 0 for a block that does not run, 1 for one that runs without experts."""
        droppable = [block for block in self.drop_order if block >= knobs.insertion_position]
        dropped = set(droppable[: self.total_blocks - knobs.blocks])
        top_ks = [
            self.full_top_k if block < knobs.insertion_position else knobs.top_k for block in range(self.total_blocks)
        ]
        return tuple(
            0 if block in dropped else top_k if self.has_experts(block) else 1 for block, top_k in enumerate(top_ks)
        )


def check_tiers(crops: Mapping[str, int], setting: str) -> None:
    """Refuse numbers of crops that do not rise from the coarsest tier to the finest."""
    counts = list(crops.values())
    if any(count < 1 for count in counts) or any(fine <= coarse for coarse, fine in pairwise(counts)):
        given = " ".join(f"{tier} {count}" for tier, count in crops.items())
        raise UserError(
            f"{setting} is {given}: the tiers must go from coarse to fine, each with more crops than the one before and"
            " at least 1. Write for example low 3 high 12."
        )


@dataclass(frozen=True)
class WorkCounts:
    """Counts of what was executed."""

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
    """The work of one answer of one token when nothing is shared: a prompt of `tokens` through its blocks.

    In the last block that runs, only the last token goes through experts: the others' states are not read any more.
    """
    path = options.block_path(knobs)
    top_ks = [top_k if options.has_experts(block) else 0 for block, top_k in enumerate(path)]
    last = max(block for block, top_k in enumerate(path) if top_k)
    pairs = tokens * sum(top_ks) - (tokens - 1) * top_ks[last]
    return WorkCounts(1 + options.crops_by_tier[knobs.tier], sum(top_k > 0 for top_k in path), pairs, patches)
