"""Expected efficiency of a step by placement, on up to 4,096 ranks: a simulation, nothing is measured.

python bench/scale.py
"""

from __future__ import annotations

import torch

from groupwise.core.expected_idle import CostSpread, expected_idle_share
from groupwise.core.shape import PLACEMENTS, StepShape

RANKS = (8, 64, 512, 4096)
GROUPS_PER_RANK, GROUP_SIZE, ROWS_PER_PASS = 4, 8, 8
SPREADS = {"answers of similar length": CostSpread(0.3, 0.2), "answers of varying length": CostSpread(0.3, 0.5)}
STEP_S, GRADIENT_BYTES, BANDWIDTH = 60.0, 4 * 8.19e9, 50e9
"""Work of a rank in one step, an 8B model's gradient in float32, and bytes per second between ranks."""


def exchange_s(ranks: int) -> float:
    """A ring sends 2 (ranks - 1) / ranks of the gradient through each rank."""
    return 2 * (ranks - 1) / ranks * GRADIENT_BYTES / BANDWIDTH


def efficiency(idle: float, ranks: int) -> float:
    """The share of a step that a rank works: it waits for the slowest rank, and for the gradient's exchange."""
    return STEP_S / (STEP_S / (1 - idle) + exchange_s(ranks))


def main() -> None:
    torch.set_num_threads(1)
    print(
        f"Simulated: {GROUPS_PER_RANK} groups of {GROUP_SIZE} on each rank, passes of {ROWS_PER_PASS} rows; costs"
        f" log-normal; {STEP_S:g} s of work; ring exchange of {GRADIENT_BYTES / 1e9:.1f} GB at {BANDWIDTH / 1e9:g} GB/s"
    )
    print("Efficiency = work / (work of the slowest rank + exchange)")
    print(f"{'':>26} {'placement':>9} {'by cost':>7} {'waits after':>11}" + "".join(f"{ranks:>8,}" for ranks in RANKS))
    for name, spread in SPREADS.items():
        for placement in PLACEMENTS:
            for ordered in (False, True) if placement == "whole" else (False,):
                for wait_after_pass in (False, True):
                    cells = []
                    for ranks in RANKS:
                        shape = StepShape(10**9, GROUPS_PER_RANK * ranks, GROUP_SIZE, ranks, ROWS_PER_PASS, placement)
                        idle = expected_idle_share(shape, spread, ordered=ordered, wait_after_pass=wait_after_pass)
                        cells.append(f"{efficiency(idle, ranks):>8.1%}")
                    waits = "each pass" if wait_after_pass else "the step"
                    print(f"{name:>26} {placement:>9} {'yes' if ordered else 'no':>7} {waits:>11}{''.join(cells)}")


if __name__ == "__main__":
    main()
