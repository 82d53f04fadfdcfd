"""The tiny workload of `fakes` with blocks that can be sharded, and that can run out of memory on one rank."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, replace
from typing import Any

import fakes
import torch
from torch import Tensor, nn

import groupwise as gw
from groupwise.core.types import concatenate_rollouts


class Block(nn.Module):
    """On the last of several ranks, the second block asks for more memory than there is when it gets several rows."""

    def __init__(self, number: int, stage: str):
        super().__init__()
        self.linear, self.stage = nn.Linear(6, 6, dtype=torch.float64), stage if number == 1 else ""

    def forward(self, hidden: Tensor) -> Tensor:
        if self.is_out("forward", hidden) or self.is_out("rollout", hidden):
            torch.empty(1 << 50, dtype=torch.uint8)
        if self.is_out("backward", hidden):
            hidden = EatsInBackward.apply(hidden)
        return hidden + torch.tanh(self.linear(hidden))

    def is_out(self, stage: str, hidden: Tensor) -> bool:
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        in_stage = self.stage == stage and torch.is_grad_enabled() == (stage != "rollout")
        return in_stage and rank == ranks - 1 > 0 and len(hidden) > 1


class EatsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        torch.empty(1 << 50, dtype=torch.uint8)
        return gradient


class BlockPolicy(fakes.TinyPolicy):
    def __init__(self, stage: str):
        super().__init__()
        self.double()
        self.blocks = nn.ModuleList(Block(number, stage) for number in range(3))

    def forward(self, conditions: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(conditions))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).view(-1, fakes.DECISIONS, fakes.CHOICES).log_softmax(-1)


class FakeWithBlocks(fakes.TinyWorkload):
    def __init__(self, config: FakeConfig, device: torch.device):
        super().__init__(config, device)
        self.policy = BlockPolicy(config.stage)

    def rollout(self, rows: gw.RolloutRows) -> gw.Rollouts:
        return concatenate_rollouts([super(FakeWithBlocks, self).rollout(part) for part in rows.passes()])


@dataclass(frozen=True)
class FakeConfig(fakes.TinyConfig):
    """All conditions but a few are flat, so that most ranks have no row to train."""

    flat_below: int = 28
    stage: str = ""
    """Where the last rank runs out of memory."""

    def build(self, device: torch.device) -> Any:
        return FakeWithBlocks(self, device)


def recipe() -> gw.Config:
    """Steps that take long enough to be killed in."""
    return replace(fakes.slow_recipe(), workload=FakeConfig(flat_below=0, seconds_per_step=0.1), steps=8)


def without_blocks() -> gw.Config:
    """Its policy has no list of layers."""
    return fakes.recipe()


def small_disk() -> gw.Config:
    """The second rank cannot write files of more than 1,000 bytes: the system refuses, as on a full disk."""
    if os.environ.get("RANK") == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    return recipe()
