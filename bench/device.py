"""What one training step of each embedded recipe costs on the emulated accelerator, in a small shape.

    python bench/device.py [--where] [RECIPE ...]

Printed are host synchronizations, kernels, bytes copied and the measured memory of the second step, each recipe in a
process of its own; with --where also the lines of groupwise that synchronized, most often first. Peak memory against
the plan: python -m accelerator.worst_case.
"""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from accelerator import emulated  # noqa: E402
from accelerator.steps import RECIPES, small_recipe  # noqa: E402

from groupwise.training.loop import train_step  # noqa: E402
from groupwise.training.setup import set_up  # noqa: E402

COLUMNS = ("host_syncs", "kernels", "bytes_to_device", "bytes_to_host", "peak_bytes")


def line_of_groupwise() -> str:
    frames = [frame for frame in traceback.extract_stack() if "/src/groupwise/" in frame.filename]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-3:])) or "autograd"


def main() -> None:
    chosen = [name for name in sys.argv[1:] if name in RECIPES] or RECIPES
    if len(chosen) == 1:
        measure(chosen[0], where="--where" in sys.argv)
        return
    print(f"| recipe | {' | '.join(name.replace('_', ' ') for name in COLUMNS)} |")
    print("|---" * (1 + len(COLUMNS)) + "|", flush=True)
    for recipe in chosen:
        flags = [argument for argument in sys.argv[1:] if argument.startswith("--")]
        subprocess.run([sys.executable, __file__, *flags, recipe], check=True)


def measure(recipe: str, *, where: bool) -> None:
    torch.set_num_threads(1)
    device, lines = emulated.register(), Counter[str]()
    setup = set_up(small_recipe(recipe, device=emulated.NAME))
    train_step(setup)
    device.reset_counters()
    if where:
        device.on_sync(lambda name: lines.update([f"{name}: {line_of_groupwise()}"]))
    train_step(setup)
    device.on_sync(None)
    counted = device.counters()
    print(f"| {recipe} | {' | '.join(f'{counted[name]:,}' for name in COLUMNS)} |")
    for line, count in lines.most_common(40):
        print(f"    {count:5d}  {line}")


if __name__ == "__main__":
    main()
