"""Two steps on some ranks, a checkpoint, and a third step on others: rank 0 writes what the run then holds.

    python shard_resume_worker.py FOLDER FROM-TO [FROM-TO ...]        (numbers of ranks; writes FOLDER/FROM-TO.pt)

One rank is not sharded, several are; one and three have their moments on the host. FOLDER/checkpoints-FROM is written
first where it is not there yet.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from processes import free_port
from shard_worker import configs
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

import groupwise as gw
from groupwise.dist.comm import disconnect, exit_now
from groupwise.dist.sharding import full
from groupwise.training.config import to_dict
from groupwise.training.loop import train_step
from groupwise.training.run_folder.checkpoint import restore
from groupwise.training.run_folder.checkpoint_writer import write_checkpoint
from groupwise.training.setup import Setup, set_up
from groupwise.workloads.checkpoint_files import newest_valid_checkpoint


def config_for(folder: Path, ranks: int) -> gw.Config:
    config = configs(folder)["chat"]
    optimizer = replace(config.optimizer, ema_decay=0.5, offload=ranks % 2 == 1)
    return replace(config, optimizer=optimizer, shard="none" if ranks == 1 else "full")


def run_rank(rank: int, ranks: int, port: int, folder: Path, written_by: int, output: Path | None) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
    config, checkpoints = config_for(folder, ranks), folder / f"checkpoints-{written_by}"
    setup = set_up(config)
    if output is None:
        _train_to(setup, 2)
        write_checkpoint(checkpoints, setup.state, config=to_dict(config), ranks=ranks, keep=1, comm=setup.comm)
    else:
        path = newest_valid_checkpoint(checkpoints, print)
        if path is not None:
            restore(path, setup.state)
            assert setup.state.step == 2
        _train_to(setup, 3)
        held = _whole_state(setup)
        if setup.comm.is_main:
            torch.save(held, output)
    disconnect()
    exit_now()


def _train_to(setup: Setup, steps: int) -> None:
    while setup.state.step < steps:
        train_step(setup)


def _whole_state(setup: Setup) -> dict[str, torch.Tensor]:
    """Weights, averaged weights and moments."""
    state = setup.state
    moments = {
        f"{index}.{name}": value if value.ndim == 0 else _placed(value, weight)
        for index, weight in enumerate(state.trainable)
        for name, value in state.optimizer.state[weight].items()
    }
    weights = {f"weight {name}": weight for name, weight in state.policy.named_parameters()}
    averaged = {f"ema {name}": weight for name, weight in state.ema.weights.items()}
    return {name: full(tensor.detach()).clone() for name, tensor in {**weights, **averaged, **moments}.items()}


def _placed(moment: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Offloaded moments of a sharded weight are plain tensors of this rank's part."""
    if not isinstance(weight, DTensor) or isinstance(moment, DTensor):
        return moment
    placing = {"shape": weight.shape, "stride": weight.stride(), "run_check": False}
    return DTensor.from_local(moment, weight.device_mesh, weight.placements, **placing)


def start(ranks: int, *arguments: object) -> None:
    start_processes(run_rank, (ranks, free_port(), *arguments), nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    config_for(folder, 1).workload.build(torch.device("cpu"))  # imports what it needs, and writes the tiny model
    for pair in sys.argv[2:]:
        first, second = map(int, pair.split("-"))
        if first and not (folder / f"checkpoints-{first}").exists():
            start(first, folder, first, None)
        start(second, folder, first, folder / f"{pair}.pt")
