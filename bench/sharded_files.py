"""Time and host memory of loading, saving, resuming and exporting a sharded policy, on the CPU with gloo.

    python bench/sharded_files.py [--width 512] [--tasks load save resume export]

The model of bench/sharding.py. Each figure comes from processes of their own, forked from one that has imported
everything; memory is how much a process has grown at its peak, or for resume the peak of torch's allocator: there the
process also grows by the holes in its heap that small tensors fill. Times are ratios within one process where they are
compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from allocator import peak_allocated
from sharding import EMBEDDED, MIB, config_for, held_bytes, peak_rss, return_freed_memory, write_model
from torch.multiprocessing.spawn import start_processes

from groupwise.cli.export import run as run_export
from groupwise.dist.comm import Comm, connect, disconnect, exit_now
from groupwise.dist.deferred_weights import deferring_weights
from groupwise.training.config import Config, to_dict
from groupwise.training.loop import train_step
from groupwise.training.run_folder.checkpoint import restore
from groupwise.training.run_folder.checkpoint_writer import CheckpointWriter, write_checkpoint
from groupwise.training.setup import Setup, _shard, set_up
from groupwise.workloads.checkpoint_files import newest_valid_checkpoint


def config_of(folder: Path, ranks: int, setting: str = "whole") -> Config:
    config = config_for(folder / "model", setting if ranks > 1 else "replicated")
    averaged = replace(config.optimizer, ema_decay=0.9)
    return replace(config, optimizer=averaged, conditions_per_step=12)  # which three ranks can share


def grown(action: Callable[[], Any]) -> dict[str, float]:
    """Seconds of an action, and MiB that the process has grown at its peak."""
    return_freed_memory()
    before, start = psutil.Process().memory_info().rss, time.perf_counter()
    kept = action()
    seconds = time.perf_counter() - start
    del kept
    return {"seconds": round(seconds, 2), "MiB": round((peak_rss() - before) / MIB, 1)}


def load(folder: Path, comm: Comm, *, deferred: bool) -> dict[str, float]:
    """Build the workload and shard it; first with a small model, so that pages of libraries do not count.

    With rollouts by blocks: else the check of the shared-prompt forward gathers all weights, as rollouts do.
    """

    def build(config: Config) -> Any:
        with deferring_weights(deferred):
            workload = config.workload.build(comm.device)
        _shard(config, comm, workload)
        return workload

    large, small = config_of(folder, comm.ranks, "blocks"), config_for(EMBEDDED, "blocks")
    build(small)
    return grown(lambda: build(large))


def trained(folder: Path, ranks: int) -> Setup:
    setup = set_up(config_of(folder, ranks))
    train_step(setup)
    return setup


def save(folder: Path, comm: Comm) -> dict[str, Any]:
    """Three times in turn: how long training stands still when it waits for the files, and when it does not."""
    setup, ranks = trained(folder, comm.ranks), comm.ranks
    settings = {"config": to_dict(setup.config), "ranks": ranks}
    writer = CheckpointWriter(folder / f"checkpoints-{ranks}", comm, keep=1)
    waiting, copying = [], []
    for _ in range(3):
        start = time.perf_counter()
        write_checkpoint(folder / f"waited-{ranks}", setup.state, keep=1, comm=comm, **settings)
        waiting.append(time.perf_counter() - start)
        start = time.perf_counter()
        writer.start(setup.state, **settings)
        copying.append(time.perf_counter() - start)
        writer.wait()
        setup.state.step += 1
    ratios = sorted(copied / waited for copied, waited in zip(copying, waiting, strict=True))
    state = sum(held_bytes(setup)[name] for name in ("weights", "moments")) + held_bytes(setup)["weights"]
    growth = grown(lambda: (writer.start(setup.state, **settings), writer.wait()))
    shown = {"waiting s": sorted(waiting)[1], "copying s": sorted(copying)[1], "median ratio": ratios[1]}
    return {name: round(value, 3) for name, value in shown.items()} | {"state MiB": state / MIB, "save": growth}


def resume(folder: Path, comm: Comm) -> dict[str, float]:
    """Restore what four ranks have saved."""
    setup = set_up(config_of(folder, comm.ranks))
    path = newest_valid_checkpoint(folder / "checkpoints-4", print)
    assert path is not None
    start = time.perf_counter()
    allocated = peak_allocated(lambda: restore(path, setup.state))
    return {"seconds": round(time.perf_counter() - start, 2), "allocated MiB": round(allocated / MIB, 1)}


def export(folder: Path, comm: Comm) -> dict[str, float]:
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    newest = newest_valid_checkpoint(folder / "checkpoints-4", print)
    assert newest is not None
    shutil.copytree(newest, run / "checkpoints" / newest.name)
    (run / "config.json").write_text(json.dumps(to_dict(config_of(folder, 1))))
    return grown(lambda: run_export([str(run), str(folder / "exported")], True))


TASKS: dict[str, Callable[[Path, Comm], Any]] = {
    "load whole": lambda folder, comm: load(folder, comm, deferred=False),
    "load rows": lambda folder, comm: load(folder, comm, deferred=True),
    "save": save,
    "resume": resume,
    "export": export,
}


def run_rank(rank: int, ranks: int, port: int, folder: Path, task: str, output: Path) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
    outcome = TASKS[task](folder, connect("cpu"))
    if rank == 0:
        output.write_text(json.dumps(outcome))
    disconnect()
    exit_now()


def measure(folder: Path, task: str, ranks: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = folder / "outcome.json"
    start_processes(run_rank, (ranks, port, folder, task, output), nprocs=ranks, start_method="fork")
    print(f"{task}, {ranks} ranks: {json.loads(output.read_text())}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tasks", nargs="+", default=["load", "save", "resume", "export"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())  # not one that exiting ranks remove
    try:
        write_model(folder / "model", options.width)
        size = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
        print(f"the model's files: {size / MIB:.1f} MiB", flush=True)
        tasks = [("load whole", 2), ("load rows", 2), ("load rows", 4), ("save", 4)]
        for task, ranks in [*tasks, ("resume", 1), ("resume", 2), ("resume", 3), ("export", 1)]:
            if task.split()[0] in options.tasks:  # resume and export need save
                measure(folder, task, ranks)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
