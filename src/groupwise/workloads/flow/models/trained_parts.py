"""What of a transformer is trained, and how the policy that training began with is reached again.
The policy that training began with, without a second model: the adapter switched off, or the first weights lent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from groupwise.core.errors import UserError
from groupwise.workloads.flow.config import TrainConfig
from groupwise.workloads.flow.models.camera_layers import camera_weights
from groupwise.workloads.lora import add_lora, without_lora


class InitialWeights:
    """Copies of the weights that are trained, as they are when this is made."""

    def __init__(self, policy: nn.Module):
        self._policy = policy
        self._first = {
            name: weight.detach().clone() for name, weight in policy.named_parameters() if weight.requires_grad
        }

    @contextmanager
    @torch.no_grad()
    def lent(self) -> Iterator[None]:
        """Meanwhile the policy holds its first weights; then its own again, bit by bit.

        The tensors change places, not their contents: a graph that was built on the present weights stays valid.
        """
        weights = {name: dict(self._policy.named_parameters())[name] for name in self._first}
        present = {name: weight.data for name, weight in weights.items()}
        try:
            for name, weight in weights.items():
                weight.data = self._first[name]
            yield
        finally:
            for name, weight in weights.items():
                weight.data = present[name]


Reference = Callable[[], AbstractContextManager[None]]


def select_trained_parameters(transformer: ModelMixin, config: TrainConfig) -> Reference:
    """Freeze all but what is trained; returns the way back to the first policy."""
    transformer.requires_grad_(False)
    if config.part == "lora":
        add_lora(
            transformer,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            targets=config.lora_targets,
            seed=config.lora_seed,
            setting="workload.train.lora_targets",
        )
        return partial(without_lora, transformer)
    if config.part == "all":
        if transformer.dtype not in (torch.float32, torch.float64):
            raise UserError(
                f"workload.train.part is 'all' and the transformer is in {transformer.dtype}: small updates would be"
                " rounded away. Load it in float32, or train 'lora' or 'camera', which are kept in float32."
            )
        transformer.requires_grad_(True)
    else:
        found = camera_weights(transformer) if isinstance(transformer, WanTransformer3DModel) else {}
        if not found:
            raise UserError("workload.train.part is 'camera', but this transformer has no camera layers. Take 'lora'.")
        for weight in found.values():
            weight.requires_grad_(True)
    return InitialWeights(transformer).lent


def enable_gradient_checkpointing(transformer: nn.Module) -> None:
    """Gradient checkpointing, as diffusers has it: blocks are computed again on the way back."""
    if not isinstance(transformer, ModelMixin):
        raise UserError(
            f"workload.gradient_checkpointing is on, and the policy is a {type(transformer).__name__}: only diffusers'"
            " own classes can do it. Switch it off."
        )
    transformer.enable_gradient_checkpointing()
