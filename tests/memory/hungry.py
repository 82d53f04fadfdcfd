"""A workload that eats memory by the row, in a process whose memory is limited: allocations fail for real.

    python hungry.py FOLDER STAGE [STAGE ...] [--shard]       (alone, or under torchrun)

trains once for every stage, into FOLDER/STAGE. With `RANK` set, only the last rank is limited.
"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from dist.shard_fakes import BlockPolicy
from fakes import TinyConfig, TinyWorkload, recipe
from torch.optim.optimizer import register_optimizer_step_pre_hook

import groupwise as gw
from groupwise.core.types import concatenate_rollouts
from groupwise.dist.comm import connect, disconnect
from groupwise.rewards.call import call_rewards

ROW = 160 << 20
ROOM = 1200 << 20
"""Four rows fit, with room for what threads claim; eight do not."""


def eat(rows: int) -> torch.Tensor:
    return torch.empty(rows * ROW, dtype=torch.uint8)


def hungry_reward(prompts, completions):
    return [float(eat(len(prompts)).ndim) for _ in prompts]


class EatsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logp):
        ctx.rows = len(logp)
        return logp.clone()

    @staticmethod
    def backward(ctx, gradient):
        eat(ctx.rows)
        return gradient


class HungryReporter(gw.Reporter):
    def describe_rollouts(self, rollouts: gw.Rollouts) -> list[dict]:
        return [{"choices": choices} for choices in rollouts.data["choices"].tolist()]


class HungryWorkload(TinyWorkload):
    """Eats in one stage, from one step on."""

    reporter = HungryReporter()
    has_eaten = False
    usual_limit: tuple[int, int] | None = None

    def __init__(self, config: HungryConfig, device: torch.device):
        super().__init__(config, device)
        self.step = -1
        if config.blocks:
            self.policy = BlockPolicy("")
        if config.own_rows:
            self.row_limits = {"decode_rows": config.own_rows}
        if config.stage == "evaluation":
            self.row_limits = {"eval_rows": 16}
        if config.stage in ("copy", "copied"):
            self.policy.register_parameter("ballast", torch.nn.Parameter(torch.zeros(8 << 20, dtype=torch.float64)))
        if config.stage == "step":
            register_optimizer_step_pre_hook(self.eat_before_step)
        if config.stage == "gather":
            self.policy.register_parameter("ballast", torch.nn.Parameter(torch.zeros(4 << 20, dtype=torch.float64)))
        if config.stage == "optimizer":
            # 128 MiB of weight, as much of gradient and of what is added to it fit into 592, and what the threads of
            # the backward pass and of the heartbeat claim (72 each); AdamW's two moments do not
            self.policy.register_parameter("ballast", torch.nn.Parameter(torch.zeros(16 << 20, dtype=torch.float64)))
            self.hoard = torch.empty(ROOM - (592 << 20), dtype=torch.uint8)

    def hungry(self, stage: str) -> bool:
        return self.config.stage == stage and self.step >= self.config.from_step

    def rollout(self, rows: gw.RolloutRows) -> gw.Rollouts:
        self.step = rows.step
        rows = replace(rows, rows_per_pass=self.row_limits.get("decode_rows", rows.rows_per_pass))
        return concatenate_rollouts([self._rollout(part) for part in rows.passes()])

    def _rollout(self, rows: gw.RolloutRows) -> gw.Rollouts:
        if self.hungry("rollout"):
            eat(len(rows))
        if self.hungry("hopeless"):
            eat(8)
        return super().rollout(rows)

    def rewards(self, rollouts: gw.Rollouts) -> gw.RewardTerms:
        if self.hungry("rewards"):
            eat(len(rollouts))
        if self.hungry("reward function"):
            terms = call_rewards({"share": hungry_reward}, range(len(rollouts)), range(len(rollouts)))
            assert not terms.failures, terms.failures
        if self.hungry("gather") and is_last_rank():
            limit(24 << 20)  # what is gathered for the update, and for the next rollout, does not fit any more
        return super().rewards(rollouts)

    def score(self, rollouts: gw.Rollouts) -> gw.Scores:
        scored = super().score(rollouts)
        if self.hungry("forward"):
            eat(len(rollouts))
        if self.hungry("backward"):
            scored = replace(scored, logp=EatsInBackward.apply(scored.logp))
        if self.config.stage in ("optimizer", "gather", "copy", "copied"):
            scored = replace(scored, logp=scored.logp + self.policy.ballast[:1])
        return scored

    def checkpoint_files(self) -> dict[str, bytes]:
        if self.hungry("copy") and self.step == 0 and self.copies_state():
            self.usual_limit = resource.getrlimit(resource.RLIMIT_AS)
            limit(60 << 20)  # weight and moments are 192, or 96 where two ranks share them
        return super().checkpoint_files()

    def copies_state(self) -> bool:
        """Whether this rank copies the state for a checkpoint; where several do, one of them."""
        return is_last_rank() if self.config.blocks else os.environ.get("RANK", "0") == "0"

    def expected_costs(self, conditions: torch.Tensor) -> torch.Tensor:
        if self.usual_limit:  # the next step has memory again: gathering the weights takes more than the copy
            resource.setrlimit(resource.RLIMIT_AS, self.usual_limit)
        return super().expected_costs(conditions)

    def eat_before_step(self, *_arguments: object) -> None:
        """Once in this process, after memory was reserved for the step."""
        if self.hungry("step") and not HungryWorkload.has_eaten:
            HungryWorkload.has_eaten = True
            eat(8)

    def evaluate(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.hungry("evaluation at once"):
            eat(8)
        if self.hungry("evaluation"):
            for part in rows.split(self.row_limits["eval_rows"]):
                eat(len(part))
        return super().evaluate(rows)


@dataclass(frozen=True)
class HungryConfig(TinyConfig):
    stage: str = ""
    from_step: int = 0
    own_rows: int = 0
    blocks: bool = False
    """Whether the policy can be sharded."""

    def build(self, device: torch.device) -> HungryWorkload:
        return HungryWorkload(self, device)


def config_for(stage: str, folder: Path, **changes) -> gw.Config:
    base = recipe()
    run = replace(base.run, run_dir=folder, samples_per_step=32, **changes.pop("run", {}))
    optimizer = replace(base.optimizer, ema_decay=None)
    workload = HungryConfig(stage=stage, **changes.pop("workload", {}))
    return replace(base, workload=workload, run=run, rows_per_pass=8, optimizer=optimizer, **changes)


def is_last_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1


def limit(room: int) -> None:
    """No more than this beyond what the process has now."""
    held = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (held + room, resource.RLIM_INFINITY))


def runs(folder: Path) -> dict[str, gw.Config]:
    """What can be asked for by name."""
    late, quiet = {"from_step": 2}, {"preflight": False}
    configs = {
        stage: config_for(stage, folder / stage)
        for stage in ("rollout", "rewards", "reward function", "forward", "backward")
    }
    configs["optimizer"] = config_for("optimizer", folder / "optimizer", run=quiet, conditions_per_step=2)
    configs["small from the start"] = replace(config_for("", folder / "small from the start"), rows_per_pass=4)
    configs["late"] = config_for("backward", folder / "late", workload=late, run=quiet, steps=4)
    configs["resumed"] = config_for("backward", folder / "late", workload=late, run=quiet | {"resume": True}, steps=6)
    configs["own rows"] = config_for("rollout", folder / "own rows", workload={"own_rows": 16})
    configs["hopeless"] = config_for("hopeless", folder / "hopeless", workload=late, run=quiet)
    configs["evaluation"] = config_for("evaluation", folder / "evaluation", workload={"from_step": -1})
    last = {"from_step": 5}
    configs["last evaluation"] = config_for("evaluation", folder / "last evaluation", workload=last, run=quiet)
    configs["gather"] = config_for(
        "gather", folder / "gather", workload={"from_step": 1}, run=quiet, conditions_per_step=2
    )
    for name in ("copy", "copied"):
        every = quiet | {"checkpoint_every": 1}
        configs[name] = config_for(name, folder / name, run=every, steps=2, conditions_per_step=2)
    third = {"from_step": 3}
    for name, how in (("step", quiet), ("step resumed", quiet | {"resume": True})):
        configs[name] = config_for("step", folder / "step", workload=third, run=how)
    configs["hopeless late"] = config_for("hopeless", folder / "hopeless late", workload=third, run=quiet)
    configs["evaluation at once"] = config_for("evaluation at once", folder / "evaluation at once", workload=last)
    return configs


if __name__ == "__main__":
    here, stages = Path(sys.argv[1]), [word for word in sys.argv[2:] if word != "--shard"]
    comm = connect(timeout_s=20.0)
    if is_last_rank():
        limit(ROOM)
    for name in stages:
        config = runs(here)[name]
        if "--shard" in sys.argv:
            config = replace(config, shard="full", workload=replace(config.workload, blocks=True))
        try:
            gw.train(config)
        except gw.UserError as error:
            sys.stderr.write(f"{name} (rank {comm.rank}): {error}\n")
    disconnect()
    os._exit(0)  # leave no thread that wants memory to say goodbye
