"""One rank of a test with several: two steps of doors on the emulated device; rank 0 writes the weights.

    python -m accelerator.ranks OUTPUT plain | oom | mixed

With `oom` only the last rank's device runs out of memory; with `mixed` the last rank is on the CPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from accelerator import emulated
from accelerator.steps import small_recipe, weights_of
from groupwise.core.errors import UserError
from groupwise.dist.comm import disconnect, exit_now
from groupwise.training.loop import train_step
from groupwise.training.setup import set_up


def main(output: Path, case: str) -> None:
    device, last = emulated.register(), int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    try:
        setup = set_up(small_recipe("doors", device="cpu" if case == "mixed" and last else emulated.NAME))
    except UserError as error:
        output.with_suffix(f".{os.environ['RANK']}").write_text(str(error))
        exit_now()
    assert setup.comm.sums_on_host == (setup.comm.ranks > 1)
    retries = 0.0
    for step in range(2):
        if case == "oom" and last and step == 1:
            limit_in_update(setup, device)
        retries += train_step(setup).metrics["oom_retries"]
    device.set_memory_limit(0)
    if setup.comm.is_main:
        torch.save({"weights": weights_of(setup), "retries": retries}, output)
    disconnect()
    exit_now()


def limit_in_update(setup, device) -> None:
    """From the first pass of the update on, a pass of 16 rows does not fit, and one of 8 does."""
    workload, score = setup.workload, setup.workload.score

    def limited(rollouts):
        rows = len(rollouts)
        device.set_memory_limit(device.counters()["live_bytes"] + (1 if rows > 8 else 1 << 30))
        return score(rollouts)

    workload.score = limited


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
