"""How much the gradient changes with rows_per_pass and with the number of ranks: only by rounding.

python bench/invariance.py
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "training")]

from fakes import recipe  # noqa: E402
from processes import on_ranks  # noqa: E402
from test_update import LOSSES, gradient_of  # noqa: E402


def between_pass_sizes() -> None:
    print("Largest difference of a gradient entry to one pass of 32 rows (float64, largest entry in brackets)")
    for name, loss in LOSSES.items():
        config = replace(recipe(), loss=loss, rows_per_pass=32)
        whole = gradient_of(config)
        gradients = {rows: gradient_of(replace(config, rows_per_pass=rows)) for rows in (1, 2, 4, 8, 16)}
        worst = max((gradient - whole).abs().max().item() for gradient in gradients.values())
        print(f"  {name:<16} rows 1, 2, 4, 8, 16: {worst:.1e}  ({whole.abs().max().item():.2g})")


def between_ranks() -> None:
    print(
        "The same between one rank and several gloo processes, over all placements and losses of tests/dist/worker.py"
    )
    with tempfile.TemporaryDirectory() as folder:
        outcomes = {}
        for ranks in (1, 2, 4, 8):
            ended = on_ranks(ranks, [TESTS / "dist" / "worker.py", Path(folder) / f"{ranks}.pt"])
            if ended.returncode:
                sys.exit(ended.stderr)
            outcomes[ranks] = torch.load(Path(folder) / f"{ranks}.pt", weights_only=False)
    alone = outcomes[1]
    for ranks in (2, 4, 8):
        worst = {
            part: max(
                (outcomes[ranks][name][part] - outcomes[1][name][part]).abs().max().item() for name in outcomes[1]
            )
            for part in ("gradient", "weights")
        }
        same = all(torch.equal(outcomes[ranks][name]["choices"], alone[name]["choices"]) for name in alone)
        print(
            f"  {ranks} ranks: gradient {worst['gradient']:.1e}, weights after 3 steps {worst['weights']:.1e},"
            f" rollouts {'identical' if same else 'DIFFERENT'}"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    between_pass_sizes()
    between_ranks()
