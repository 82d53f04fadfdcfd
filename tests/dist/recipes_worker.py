"""One step of every embedded recipe in its default shape, on several numbers of ranks; rank 0 writes the metrics.

    python recipes_worker.py FOLDER RANKS [RANKS ...]        (writes FOLDER/RANKS.json)

Ranks are forked from a process that has imported everything: that takes much longer than the steps.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from processes import free_port
from torch.multiprocessing.spawn import start_processes

import groupwise as gw
from groupwise.dist.comm import connect, disconnect, exit_now
from groupwise.recipes import load_recipe
from groupwise.training.loop import train_step
from groupwise.training.setup import set_up


def configs() -> dict[str, gw.Config]:
    recipes = {name: replace(load_recipe(name), steps=1) for name in ("chat", "controller", "flow")}
    # Fewer questions and scenes, and no profile of this machine: both take long and change no shape.
    small = {
        "controller": {"mosaics": 24, "held_out_mosaics": 1, "estimator": "proportional"},
        "flow": {"scenes": 32, "held_out_scenes": 1},
    }
    for name, sizes in small.items():
        recipes[name] = replace(recipes[name], workload=replace(recipes[name].workload, **sizes))
    return recipes


def run_rank(rank: int, ranks: int, port: int, output: Path) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
    metrics = {name: dict(train_step(set_up(config)).metrics) for name, config in configs().items()}
    if connect().is_main:
        output.write_text(json.dumps(metrics))
    disconnect()
    exit_now()


if __name__ == "__main__":
    for config in configs().values():
        config.workload.build(torch.device("cpu"))  # imports what it needs
    for count in map(int, sys.argv[2:]):
        arguments = (count, free_port(), Path(sys.argv[1]) / f"{count}.json")
        start_processes(run_rank, arguments, nprocs=count, start_method="fork")
