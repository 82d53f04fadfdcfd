"""What training changes: policy, optimizer, EMA weights, step counters; and the learning rate as a function of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from groupwise.core.errors import UserError
from groupwise.dist.devices import traits
from groupwise.dist.sharding import copy_weights
from groupwise.memory.recovery import RowLimits
from groupwise.training.config import OptimizerConfig
from groupwise.training.offload import OffloadedAdamW


@dataclass
class State:
    """The only mutable record of a run. `update` and `restore` change it, and `Recovery` the row limits."""

    policy: nn.Module
    optimizer: torch.optim.Optimizer
    ema: Ema | None = None
    step: int = 0
    """Complete steps."""
    updates: int = 0
    """Optimizer steps so far."""
    row_limits: RowLimits = field(default_factory=lambda: {"rows_per_pass": 1})
    """Most rows at once, by name; halved when memory runs out. They never change a result."""

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.policy.parameters() if parameter.requires_grad]

    @property
    def offloaded(self) -> bool:
        """Whether the moments are on the host."""
        return isinstance(self.optimizer, OffloadedAdamW)

    @property
    def fused(self) -> bool:
        """Whether the optimizer's step is one operation, which needs no temporary memory."""
        return bool(self.optimizer.defaults["fused"])


@dataclass
class Ema:
    """Exponential moving average of the trainable weights."""

    decay: float
    weights: dict[str, Tensor] = field(default_factory=dict)

    def update(self, policy: nn.Module) -> None:
        """Once per optimizer step: average = decay x average + (1 - decay) x weight."""
        for name, weight in trainable_weights(policy).items():
            self.weights[name].lerp_(weight.detach(), 1 - self.decay)

    @contextmanager
    def swapped_in(self, policy: nn.Module) -> Iterator[None]:
        """The policy holds the averaged weights meanwhile, and its own again afterwards, bit-identical."""
        parameters = trainable_weights(policy)
        saved = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        try:
            copy_weights(parameters, self.weights)
            yield
        finally:
            copy_weights(parameters, saved)


def create_state(policy: nn.Module, config: OptimizerConfig) -> State:
    weights = trainable_weights(policy)
    if not weights:
        raise UserError(
            "The policy has no parameter that requires a gradient, so there is nothing to train. Unfreeze some, or add"
            " an adapter."
        )
    optimizer = (OffloadedAdamW if config.offload else torch.optim.AdamW)(
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
    """Memory on the device for AdamW's two moments of each weight that has none yet; offloaded, of the largest one."""
    if state.offloaded:
        largest = max(state.trainable, key=lambda weight: weight.numel())
        return [torch.empty_like(largest) for _ in range(2)]
    new = [weight for weight in state.trainable if not state.optimizer.state.get(weight)]
    return [torch.empty_like(weight) for weight in new for _ in range(2)]


def reserve_optimizer_memory(state: State) -> None:
    """Allocate and free what the optimizer's step will need, so that it cannot run out of memory half-way.

    Two moments for each weight that has none yet; and where AdamW is not fused, one temporary for every weight.
    """
    reserved = missing_adam_state(state)
    if not state.fused and not state.offloaded:
        reserved += [torch.empty_like(weight) for weight in state.trainable]


def _supports_fused_adamw(weight: nn.Parameter) -> bool:
    """The fused kernel ignores strides: it needs contiguous weights, gradients and moments.

    Gradients are contiguous once they are summed over the ranks; moments have the strides of their weight.
    """
    return traits(weight.device).fused_adamw and weight.is_floating_point() and weight.is_contiguous()


def trainable_weights(policy: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}


def learning_rate(config: OptimizerConfig, update: int, updates: int) -> float:
    """The rate of one update of `updates`: a pure function, so no schedule has to be saved."""
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (update - config.warmup_updates) / max(1, updates - config.warmup_updates))
    factor = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * factor
