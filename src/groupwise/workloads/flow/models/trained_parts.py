"""Which weights of a transformer are trained, and the reference policy: the same transformer with its initial weights.

There is no second model: the reference switches the adapter off, or swaps the initial weights in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from groupwise.core.errors import UserError
from groupwise.dist.deferred_weights import after_loading, is_deferred
from groupwise.dist.sharding import is_sharded, other_weights
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.models.camera_layers import camera_weights
from groupwise.workloads.lora import add_lora, without_lora

Reference = Callable[[], AbstractContextManager[None]]
"""Within the context that it returns, the policy is the reference policy."""


def select_trained_parameters(transformer: ModelMixin, config: TrainedPartsConfig) -> Reference:
    """Freeze everything that is not trained; returns the reference policy."""
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
    config.check_dtype(str(transformer.dtype).removeprefix("torch."))
    for weight in _trained_weights(transformer, config.part):
        weight.requires_grad_(True)
    return InitialWeights(transformer).swapped_in


def _trained_weights(transformer: ModelMixin, part: str) -> list[nn.Parameter]:
    if part == "all":
        return list(transformer.parameters())
    layers = camera_weights(transformer) if isinstance(transformer, WanTransformer3DModel) else {}
    if not layers:
        raise UserError(f"workload.train.part is '{part}', but this transformer has no camera layers. Take 'lora'.")
    if part == "camera":
        return list(layers.values())
    return [weight for name, weight in transformer.named_parameters() if ".attn1." in name]


class InitialWeights:
    """Copies of the trained weights, as they are when this is created."""

    def __init__(self, policy: nn.Module):
        self._policy = policy
        self._initial: dict[str, Tensor] = {}
        if is_deferred(policy):
            after_loading(policy, self._copy)
        else:
            self._copy()

    def _copy(self) -> None:
        trained = {name: weight for name, weight in self._policy.named_parameters() if weight.requires_grad}
        self._initial |= {name: weight.detach().clone() for name, weight in trained.items()}

    @torch.no_grad()
    def swapped_in(self) -> AbstractContextManager[None]:
        """Within this context the policy has its initial weights; afterwards its own again, bit-identical."""
        return other_weights(self._policy, self._initial) if is_sharded(self._policy) else self._swapped_in()

    @contextmanager
    @torch.no_grad()
    def _swapped_in(self) -> Iterator[None]:
        """The tensors are swapped, not their contents: a graph that was built on the current weights stays valid."""
        parameters = dict(self._policy.named_parameters())
        current = {name: parameters[name].data for name in self._initial}
        try:
            for name, initial in self._initial.items():
                parameters[name].data = initial
            yield
        finally:
            for name, weight in current.items():
                parameters[name].data = weight


def enable_gradient_checkpointing(policy: nn.Module) -> None:
    """diffusers' gradient checkpointing, of a transformer or of several: blocks are recomputed in the backward pass."""
    transformers = [policy] if isinstance(policy, ModelMixin) else list(policy.children())
    for transformer in transformers:
        if not isinstance(transformer, ModelMixin):
            raise UserError(
                f"workload.gradient_checkpointing is on, and the policy is a {type(policy).__name__}: only diffusers'"
                " classes support it. Switch it off."
            )
        transformer.enable_gradient_checkpointing()
