"""Three steps of each workload, sharded and not, for each placement; rank 0 writes the outcomes.

    python shard_worker.py FOLDER RANKS [RANKS ...]        (writes FOLDER/RANKS.pt; one rank is not sharded)

Ranks are forked from a process that has imported everything: that takes much longer than the steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tiny.chat
import tiny.controller
import torch
import workloads.flow.small
from processes import free_port
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

import groupwise as gw
from groupwise.core.placement import place
from groupwise.dist.comm import Comm, connect, disconnect, exit_now
from groupwise.dist.sharding import full
from groupwise.training.loop import training_steps
from groupwise.training.rollout import generate_rollouts
from groupwise.training.setup import set_up
from groupwise.workloads.chat.config import PolicyConfig

PLACEMENTS = ("whole", "spread", "shuffled")


@dataclass(frozen=True)
class DoubleFlow(workloads.flow.small.SmallConfig):
    """The small flow task with its transformer in float64."""

    def task(self, device: torch.device) -> Any:
        task = super().task(device)
        task.model.policy.double()
        kind = type(task.model)

        class InDouble(kind):  # type: ignore[misc, valid-type]
            def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
                inputs = {name: column.double() for name, column in conditioning.items()}
                return super().velocity(latents.double(), sigma.double(), inputs)

        task.model.__class__ = InDouble
        return task


@dataclass(frozen=True)
class DoubleController(tiny.controller.SmallConfig):
    """The small controller with its network in float64."""

    def build(self, device: torch.device) -> Any:
        workload = super().build(device)
        workload.policy.double()
        return workload


def base_configs(folder: Path) -> dict[str, gw.Config]:
    chat = tiny.chat.recipe(folder / "chat")
    in_double = PolicyConfig(model=chat.workload.policy.model, dtype="float64", reference="copy")
    kl = gw.LossConfig(kl=0.05, entropy=0.01)
    chat = replace(chat, workload=replace(chat.workload, policy=in_double), loss=kl)
    flow = replace(workloads.flow.small.recipe(), workload=DoubleFlow(reference=True))
    shared = {"steps": 3, "conditions_per_step": 6, "group_size": 4, "rows_per_pass": 2}
    bases = {"chat": chat, "controller": tiny.controller.recipe(), "flow": flow}
    return {name: replace(config, **shared) for name, config in bases.items()}


def outcome(config: gw.Config) -> dict[str, Any]:
    """Rollouts of the first step in order, the first gradient, and the weights after three steps."""
    setup = set_up(config)
    placement = place(setup.shape, seed=config.seed, step=0)
    rows = placement.rows_of(setup.comm.rank)
    rollouts = generate_rollouts(setup, placement)
    entries = zip(rows.group.tolist(), rows.member.tolist(), rollouts.logp, _decisions(rollouts), strict=True)
    in_order = sorted(setup.comm.gather_objects(list(entries)), key=lambda entry: entry[:2])
    steps = training_steps(setup)
    first = next(steps)
    gradient = torch.cat([full(weight.grad).flatten() for weight in setup.state.trainable])
    metrics = [dict(step.metrics) for step in (first, *steps)]
    weights = torch.cat([full(weight.detach()).flatten() for weight in setup.state.trainable])
    held = sum(_local_numel(weight) for weight in setup.state.trainable)
    ema = setup.state.ema
    return {
        "logp": [entry[2] for entry in in_order],
        "decisions": [entry[3] for entry in in_order],
        "gradient": gradient,
        "weights": weights,
        "ema": torch.cat([full(weight).flatten() for weight in ema.weights.values()]) if ema else None,
        "grad_norms": [step["grad_norm"] for step in metrics],
        "held": setup.comm.gather_objects([held]),
    }


def _local_numel(weight: Tensor) -> int:
    return weight.to_local().numel() if hasattr(weight, "to_local") else weight.numel()


def _decisions(rollouts: gw.Rollouts) -> list[Any]:
    data = rollouts.data
    if "completion" in data:
        return [completion.ids for completion in data["completion"]]
    return data["choices"].tolist() if "choices" in data else list(data["latents"].clone())


def run_rank(rank: int, ranks: int, port: int, folder: Path, names: list[str]) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
    torch.set_num_threads(1)
    outcomes = {}
    for name, config in base_configs(folder).items():
        for placement in PLACEMENTS if name in names else ():
            config = replace(config, placement=placement, shard="none" if ranks == 1 else "full")
            outcomes[f"{name} {placement}"] = outcome(config)
    if connect().is_main:
        torch.save(outcomes, folder / f"{ranks}.pt")
    disconnect()
    exit_now()


if __name__ == "__main__":
    folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
    for config in base_configs(folder).values():
        config.workload.build(torch.device("cpu"))  # imports what it needs, and writes the tiny model
    for count in map(int, sys.argv[3:]):
        start_processes(run_rank, (count, free_port(), folder, names), nprocs=count, start_method="fork")
