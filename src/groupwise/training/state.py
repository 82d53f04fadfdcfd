"""What training changes: the policy's weights, the optimizer, their average, and how far it came."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from groupwise.core.errors import UserError
from groupwise.dist.devices import has_fused_adamw
from groupwise.memory.recovery import RowLimits
from groupwise.training.config import OptimizerConfig


@dataclass
class State:
    """The one thing that is mutated, and only by `update` and `restore`."""

    policy: nn.Module
    optimizer: torch.optim.Optimizer
    ema: Ema | None = None
    step: int = 0
    """Steps that are complete."""
    updates: int = 0
    """Updates of the policy so far; the learning-rate schedule is a function of it."""
    cut: RowLimits = field(default_factory=lambda: RowLimits(rows_per_pass=1))
    """Into how many pieces the work is cut at present."""

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.policy.parameters() if parameter.requires_grad]

    @property
    def fused(self) -> bool:
        """The optimizer's step is one operation, which needs no memory of its own."""
        return bool(self.optimizer.defaults["fused"])


@dataclass
class Ema:
    """An exponential moving average of the trainable weights, in copies of its own."""

    decay: float
    average: dict[str, Tensor] = field(default_factory=dict)

    def follow(self, policy: nn.Module) -> None:
        """Once per update: average = decay x average + (1 - decay) x weight."""
        for name, weight in trainable_weights(policy).items():
            self.average[name].lerp_(weight.detach(), 1 - self.decay)

    @contextmanager
    def borrowed(self, policy: nn.Module) -> Iterator[None]:
        """The policy holds the average meanwhile, and its own weights again afterwards, bit by bit."""
        weights = trainable_weights(policy)
        kept = {name: weight.detach().clone() for name, weight in weights.items()}
        try:
            _copy_into(weights, self.average)
            yield
        finally:
            _copy_into(weights, kept)


def create_state(policy: nn.Module, config: OptimizerConfig) -> State:
    weights = trainable_weights(policy)
    if not weights:
        raise UserError(
            "The policy has no parameter that requires a gradient, so there is nothing to train. Unfreeze some, or add"
            " an adapter."
        )
    optimizer = torch.optim.AdamW(
        weights.values(),
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=all(map(_supports_fused_adamw, weights.values())) or None,  # None leaves it to torch
    )
    ema = None
    if config.ema_decay is not None:
        ema = Ema(config.ema_decay, {name: weight.detach().clone() for name, weight in weights.items()})
    return State(policy, optimizer, ema)


def missing_adam_state(state: State) -> list[Tensor]:
    """Room for AdamW's two moments of each weight that has none yet."""
    return [torch.empty_like(each) for each in state.trainable if not state.optimizer.state.get(each) for _ in range(2)]


def reserve_optimizer_memory(state: State) -> None:
    """Take and give back what the optimizer's step will need: it must not run out of memory among half the weights.

    Two moments for each weight that has none yet, and where AdamW is not fused, its results: one of every weight.
    """
    room = missing_adam_state(state)
    if not state.fused:
        room += [torch.empty_like(weight) for weight in state.trainable]


def _supports_fused_adamw(weight: nn.Parameter) -> bool:
    """The kernel takes weights, gradients and moments as they lie in memory, whatever their strides, and says nothing.

    Gradients are contiguous once they are summed over the ranks, moments lie as their weight does.
    """
    return has_fused_adamw(weight.device) and weight.is_floating_point() and weight.is_contiguous()


def trainable_weights(policy: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}


def learning_rate(config: OptimizerConfig, update: int, updates: int) -> float:
    """The rate of one update of `updates`: a pure function, so there is no schedule to save or to lose."""
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (update - config.warmup_updates) / max(1, updates - config.warmup_updates))
    share = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * share


@torch.no_grad()
def _copy_into(weights: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        weight.copy_(values[name])
