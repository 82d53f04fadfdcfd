"""Trains a shrunken recipe in children that are killed -9 at random moments, and once without a kill.

    python kills.py RECIPE FOLDER KILLS

Prints one JSON object: whether both runs have the same bytes, how many kills came while a child was still starting, and
for the others the seconds from the start of a child to the first step that it logged beyond those of its predecessors.
Children are forked from a process that has imported everything: that takes much longer than the steps.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from bench.soak import small_recipe

from groupwise.core.io.files import read_jsonl
from groupwise.training.run import train

CLOCK = ("rollout_s", "reward_s", "update_s", "memory_bytes")


def start(config) -> int:
    child = os.fork()
    if child == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        train(config)
        os._exit(0)
    return child


def logged(folder: Path) -> int:
    return len(read_jsonl(folder / "metrics.jsonl"))


def result_of(folder: Path, steps: int) -> tuple[list[dict], dict[str, bytes]]:
    metrics = [{n: v for n, v in e.items() if n not in CLOCK} for e in read_jsonl(folder / "metrics.jsonl")]
    checkpoint = folder / "checkpoints" / f"step-{steps:06d}"
    return metrics, {path.name: path.read_bytes() for path in sorted(checkpoint.glob("*.safetensors"))}


def main(recipe: str, folder: Path, kills: int) -> None:
    draw = random.Random(f"{recipe} {kills}")
    steps = kills + 2
    config = small_recipe(recipe, steps=steps, checkpoint_every=1, resume=True)
    config = replace(config, run=replace(config.run, run_dir=folder / "killed"))
    config.workload.build(__import__("torch").device("cpu"))  # imports what it needs
    step_s, recovery_s, at_start = 0.2, [], 0
    for kill in range(kills):
        begun, before = time.monotonic(), logged(folder / "killed")
        child = start(config)
        while logged(folder / "killed") < kill + 1:
            time.sleep(0.005)
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "a child has ended by itself"
        if before >= kill + 1:  # the lines of its predecessors: this one has not trained yet
            at_start += 1
        elif before:
            recovery_s.append(time.monotonic() - begun)
        time.sleep(draw.uniform(0, 1.5 * step_s))  # in any stage of the next step, or while the checkpoint is written
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for run in ("killed", "unbroken"):
        child = start(replace(config, run=replace(config.run, run_dir=folder / run)))
        assert os.waitpid(child, 0)[1] == 0, f"{run} has failed"
    same = result_of(folder / "killed", steps) == result_of(folder / "unbroken", steps)
    recovery = statistics.median(recovery_s) if recovery_s else 0.0
    figures = {"kills": kills, "at_start": at_start, "same": same, "median_recovery_s": round(recovery, 2)}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
