"""The settings that are scored: tier, number of blocks and top-k, with the first insertion position."""

from dataclasses import dataclass
from itertools import product

from groupwise.workloads.controller.mosaic.crops import Tier
from groupwise.workloads.controller.mosaic.model import BLOCKS, FEWEST_BLOCKS, SMALLEST_TOP_K, TOP_K


@dataclass(frozen=True, order=True)
class Setting:
    """One configuration of the model's inference."""

    tier: Tier
    blocks: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.tier}, {self.blocks} blocks, top-{self.top_k}"


FULL = Setting(Tier.HIGH, BLOCKS, TOP_K)
CHEAPEST = Setting(Tier.LOW, FEWEST_BLOCKS, SMALLEST_TOP_K)
SINGLE_KNOBS = {
    "tier": Setting(Tier.LOW, BLOCKS, TOP_K),
    "blocks": Setting(Tier.HIGH, FEWEST_BLOCKS, TOP_K),
    "top-k": Setting(Tier.HIGH, BLOCKS, SMALLEST_TOP_K),
}
GRID = tuple(
    Setting(tier, blocks, top_k)
    for tier, blocks, top_k in product(Tier, range(FEWEST_BLOCKS, BLOCKS + 1), range(SMALLEST_TOP_K, TOP_K + 1))
)
