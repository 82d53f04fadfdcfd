"""Three steps of each workload, sharded and not; rank 0 writes the outcomes.

    python shard_worker.py FOLDER RUNS RANKS [RANKS ...]               (writes FOLDER/RANKS.pt; one rank is not sharded)

RUNS, with commas between them, are names of `configs`, a mode of the rollout and a placement, as in chat/blocks/spread.
One process has one run of each name, which no sharding or placement may change. Ranks are forked from a process that
has imported everything: that takes longer than the steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fakes
import tiny.chat
import tiny.controller
import torch
import workloads.flow.small
from processes import free_port
from shard_fakes import FakeConfig
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

import groupwise as gw
from groupwise.core.placement import place
from groupwise.dist.comm import connect, disconnect, exit_now
from groupwise.dist.sharding import full, local, rollout_mode, rollout_weights
from groupwise.training.loop import training_steps
from groupwise.training.rollout import generate_rollouts
from groupwise.training.setup import Setup, set_up
from groupwise.workloads.chat.config import PolicyConfig
from groupwise.workloads.controller.config import BudgetConfig

SHAPE = {"steps": 3, "conditions_per_step": 12, "group_size": 2, "rows_per_pass": 2}


@dataclass(frozen=True)
class DoubleFlow(workloads.flow.small.SmallConfig):
    """The small flow task with its transformer in float64."""

    def task(self, device: torch.device) -> Any:
        task = super().task(device)
        kind = type(task.model)

        class InDouble(kind):  # type: ignore[misc, valid-type]
            def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
                inputs = {name: column.double() for name, column in conditioning.items()}
                return super().velocity(latents.double(), sigma.double(), inputs)

        return replace(task, model=InDouble(task.model.policy.double()), conditions=task.conditions[:12])


@dataclass(frozen=True)
class DoubleController(tiny.controller.SmallConfig):
    """The small controller with its network in float64."""

    def build(self, device: torch.device) -> Any:
        workload = super().build(device)
        for part in workload.policy.double().children():
            part.register_forward_pre_hook(_to_double)
        return workload


def _to_double(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each.double() if torch.is_tensor(each) and each.is_floating_point() else each for each in inputs)


def configs(folder: Path) -> dict[str, gw.Config]:
    kl, ranking = gw.LossConfig(kl=0.05, entropy=0.01), gw.LossConfig(kind="ranking")
    flow = replace(workloads.flow.small.recipe(), workload=DoubleFlow(reference=True), **SHAPE)
    slow, many = gw.OptimizerConfig(learning_rate=1e-4), {**SHAPE, "group_size": 4}
    budget = BudgetConfig(values=(0.7, 0.9, 1.2))
    twice = gw.OptimizerConfig(learning_rate=1e-2, updates_per_step=2, ema_decay=0.5)
    return {
        "chat": replace(_chat(folder, reference="copy"), loss=kl),
        "controller": replace(
            tiny.controller.recipe(), workload=DoubleController(budget=budget), optimizer=slow, **many
        ),
        "flow": replace(flow, rows_per_pass=1),  # it takes latents in float32, where the rows of a pass matter
        "idle": replace(fakes.recipe(), workload=FakeConfig(), loss=ranking, optimizer=twice, **SHAPE),
        **{
            f"oom {stage}": replace(fakes.recipe(), workload=FakeConfig(flat_below=0, stage=stage), **SHAPE)
            for stage in ("forward", "backward", "rollout")
        },
        "chat lora": replace(_chat(folder, reference="adapter", lora_rank=2, gradient_checkpointing=True), loss=kl),
        "chat plain": replace(_chat(folder, forward="plain"), shard_exchange="update"),
        "chat checkpointed": replace(_chat(folder, reference="copy", gradient_checkpointing=True), loss=kl),
        "chat float32": replace(_chat(folder, reference="copy", dtype="float32"), loss=kl),
        "chat bfloat16": replace(_chat(folder, reference="copy", dtype="bfloat16"), loss=kl),
        "nodes": replace(fakes.recipe(), workload=FakeConfig(), optimizer=twice, shard_over="node", **SHAPE),
        "flow by steps": replace(flow, rows_per_pass=1, loss=replace(flow.loss, ratio="rollout")),
    }


def _chat(folder: Path, **policy: Any) -> gw.Config:
    config = tiny.chat.recipe(folder / "chat")
    settings = PolicyConfig(model=config.workload.policy.model, **{"dtype": "float64", **policy})
    return replace(config, workload=replace(config.workload, policy=settings), **SHAPE)


def outcome(config: gw.Config) -> dict[str, Any]:
    """Rollouts of the first step in order, the first gradient, and the weights after three steps."""
    setup = set_up(config)
    has_blocks = isinstance(config.workload, FakeConfig) and not config.workload.stage
    uneven = setup.comm.gather_objects(_uneven_forwards(setup) if has_blocks else [])
    placement = place(setup.shape, seed=config.seed, step=0)
    rows = placement.rows_of(setup.comm.rank)
    rollouts = setup.recovery.retry_smaller("rollout", generate_rollouts, setup, placement)
    entries = zip(rows.group.tolist(), rows.member.tolist(), rollouts.logp, _decisions(rollouts), strict=True)
    in_order = sorted(setup.comm.gather_objects(list(entries)), key=lambda entry: entry[:2])
    steps = training_steps(setup)
    first = next(steps)
    weights = setup.state.trainable
    gradient = torch.cat([full(weight.grad).flatten() for weight in weights])
    metrics = [dict(step.metrics) for step in (first, *steps)]
    ema = setup.state.ema
    return {
        "logp": [entry[2] for entry in in_order],
        "decisions": [entry[3] for entry in in_order],
        "gradient": gradient,
        "weights": torch.cat([full(weight.detach()).flatten() for weight in weights]),
        "ema": torch.cat([full(weight).flatten() for weight in ema.weights.values()]) if ema else torch.zeros(0),
        "grad_norms": torch.tensor([step["grad_norm"] for step in metrics]),
        "rows_per_pass": [step["rows_per_pass"] for step in metrics],
        "uneven": uneven,
        "rollout": rollout_mode(setup.workload.policy),
        "held": setup.comm.gather_objects([sum(local(weight.detach()).numel() for weight in weights)]),
    }


def _uneven_forwards(setup: Setup) -> list[Tensor]:
    """Rank r runs the policy 2 r times, and odd ranks its blocks in reverse order before."""
    comm, policy = setup.comm, setup.workload.policy
    outputs = []
    with comm.fail_together("Running the policy"), rollout_weights(policy), torch.inference_mode():
        hidden = torch.ones(1, 6, dtype=torch.float64)
        for block in reversed(policy.blocks) if comm.rank % 2 else ():
            hidden = block(hidden)
        outputs += [policy(torch.arange(3)) for _ in range(2 * comm.rank)]
        alone = policy(torch.arange(3)) if comm.ranks == 1 else None
    return [alone.clone()] if alone is not None else [output.clone() for output in outputs]


def _decisions(rollouts: gw.Rollouts) -> list[Any]:
    data = rollouts.data
    if "completion" in data:
        return [completion.ids for completion in data["completion"]]
    return (data["choices"] if "choices" in data else data["latents"]).tolist()


def run_rank(rank: int, ranks: int, port: int, folder: Path, runs: list[str]) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
    settings, outcomes = configs(folder), {}
    for run in runs if ranks > 1 else sorted({run.split("/")[0] for run in runs}):
        name, *modes = run.split("/")
        config = replace(settings[name], placement="shuffled")
        if modes:
            config = replace(config, shard="full", shard_rollout=modes[0], placement=modes[1])
        os.environ["LOCAL_WORLD_SIZE"] = str(2 if config.shard_over == "node" else ranks)
        outcomes[run] = outcome(config)
    if connect().is_main:
        torch.save(outcomes, folder / f"{ranks}.pt")
    disconnect()
    exit_now()


if __name__ == "__main__":
    folder, runs = Path(sys.argv[1]), sys.argv[2].split(",")
    torch.set_num_threads(1)
    for name, config in configs(folder).items():
        if name in {run.split("/")[0] for run in runs}:
            config.workload.build(torch.device("cpu"))  # imports what it needs, and writes the tiny models
    for count in map(int, sys.argv[3:]):
        arguments = (count, free_port(), folder, runs)
        start_processes(run_rank, arguments, nprocs=count, start_method="fork")
