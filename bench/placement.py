"""How long the placement of any step of a very large run takes.

python bench/placement.py
"""

from __future__ import annotations

import statistics
import time

import torch

from groupwise.core.placement import place
from groupwise.core.shape import PLACEMENTS, StepShape

RUNS = 20


def milliseconds(shape: StepShape, step: int) -> float:
    started = time.perf_counter()
    place(shape, seed=0, step=step).rows_of(shape.ranks - 1)
    return 1000 * (time.perf_counter() - started)


def main() -> None:
    torch.set_num_threads(1)
    print(
        "Placement of one step, 4,096 ranks x 4 rows x 4 passes = 65,536 rollouts; median and largest of 20, measured"
    )
    print(f"{'conditions':>12} {'placement':>9} {'inside an epoch':>22} {'across two epochs':>22}")
    for conditions in (20_000, 10_000_000, 10_000_000_000):
        for placement in PLACEMENTS:
            shape = StepShape(conditions, 8192, 8, ranks=4096, rows_per_pass=4, placement=placement)
            place(shape, seed=0, step=0)
            across = conditions // 8192
            cells = []
            for step in (across // 2 if across > 1 else 0, across):
                times = [milliseconds(shape, step) for _ in range(RUNS)]
                cells.append(f"{statistics.median(times):6.1f} ms {max(times):6.1f} ms")
            print(f"{conditions:>12,} {placement:>9} {cells[0]:>22} {cells[1]:>22}")


if __name__ == "__main__":
    main()
