"""A language model as a policy: loaded, perhaps with an adapter, with a reference to compare with."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from groupwise.core.errors import UserError
from groupwise.workloads.chat.config import PolicyConfig
from groupwise.workloads.chat.engine.attention import Layout
from groupwise.workloads.chat.engine.forward import HiddenStatesFn, shared_prefix_forward
from groupwise.workloads.chat.engine.logprobs import OutputHead
from groupwise.workloads.hub import load_from_hub, resolve_model
from groupwise.workloads.lora import add_lora, without_lora

__all__ = ["LanguageModelPolicy", "PolicyConfig", "load_policy", "make_policy"]


class LanguageModelPolicy(nn.Module):
    """A causal language model that is sampled and trained. Dropout is off for good: the ratio would not be 1."""

    def __init__(self, model: Any, config: PolicyConfig, frozen_copy: Any = None):
        super().__init__()
        self.model = model
        """The transformers model, with PEFT's layers in it where there is an adapter."""
        self.config = config
        self._reference = (frozen_copy,)  # in a tuple: it is no part of what is trained and saved
        self._active = (model,)
        self._forwards: tuple[HiddenStatesFn, ...] = ()
        """How to compute the policy, and its frozen copy, where they share prompts."""
        self.why_plain = self._choose_path()
        """Why prompts are not shared; None where they are."""

    @property
    def causal_lm(self) -> Any:
        """The transformers model that computes now: the policy's, or the frozen copy within `reference()`."""
        return self._active[0]

    @property
    def shares_prompts(self) -> bool:
        return self.why_plain is None

    @property
    def head(self) -> OutputHead:
        """The layer that turns hidden states into logits."""
        layer, computed_in = self.causal_lm.get_output_embeddings(), getattr(torch, self.config.dtype)
        return OutputHead(layer.weight, layer.bias, computed_in)

    def hidden(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """Hidden states before the head, [predicting tokens, width], of ids and positions [batch, tokens]."""
        copied = self._active is self._reference
        return self._forwards[copied](ids, positions, layout)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def longest(self) -> int | None:
        """Tokens that a prompt and its completion may have together, by the model's own configuration."""
        config = self.causal_lm.config
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            # Beyond it all positions are turned otherwise, those of earlier tokens too: what was sampled before would
            # be scored differently.
            return rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        return getattr(config, "max_position_embeddings", None)

    @property
    def has_reference(self) -> bool:
        return self.config.reference != "none"

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within, the reference computes, without gradient."""
        assert self.has_reference, "the policy has no reference"
        with torch.no_grad(), without_lora(self.model) if self.config.reference == "adapter" else nullcontext():
            own, self._active = self._active, self._reference if self._reference[0] else self._active
            try:
                yield
            finally:
                self._active = own

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Within, nothing is kept for a backward pass; tensors made here must not be trained on.

        In inference mode autocast would not keep the weights it rounds, and round them all again for every token.
        """
        rounds = self.config.dtype == "bfloat16"
        with torch.no_grad() if rounds else torch.inference_mode(), self.autocast():
            self._keep_layer_inputs_only(False)
            try:
                yield
            finally:
                self._keep_layer_inputs_only(self.config.gradient_checkpointing)

    def autocast(self) -> AbstractContextManager[Any]:
        """Products in bfloat16, where the policy is to compute in it."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16")

    def train(self, mode: bool = True) -> LanguageModelPolicy:
        """Training and sampling see the same function, so modules stay in evaluation mode always."""
        super().train(False)
        self._keep_layer_inputs_only(self.config.gradient_checkpointing)
        return self

    def _keep_layer_inputs_only(self, on: bool) -> None:
        """transformers checkpoints a layer that is in training mode; the parts within stay in evaluation mode."""
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = on

    def _choose_path(self) -> str | None:
        if self.config.path == "plain":
            return "it was asked for (policy.path is 'plain')"
        for model in (self.causal_lm, *(each for each in self._reference if each is not None)):
            forward = shared_prefix_forward(model)
            if isinstance(forward, str):
                return self._take_plain(forward)
            self._forwards = (*self._forwards, forward)
        return None

    def _take_plain(self, reason: str) -> str:
        if self.config.path == "shared":
            raise UserError(
                f"policy.path is 'shared', and {type(self.causal_lm).__name__} cannot share prompts: {reason}. Set"
                " policy.path to 'auto' to train it on the slower, plain path."
            )
        return reason

    def forward(self, ids: Tensor, **kwargs: Any) -> Any:
        """The whole model as transformers runs it (the plain path)."""
        return self.causal_lm(input_ids=ids, **kwargs)


def load_policy(config: PolicyConfig, device: torch.device | str = "cpu") -> LanguageModelPolicy:
    """The model in a folder, or the one of that name on the hub, ready to be sampled and trained."""
    source = _source(config.folder_or_name)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load_from_hub(
        source,
        lambda: load(source, dtype=_weight_dtype(config), output_loading_info=True),
        called=f"policy.model is {source!r}, which",
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"policy.model {source!r} lacks {len(missing)} of its weights, {missing[0]} among them: they would be"
            " random. Fetch all files of the model again."
        )
    return make_policy(model.to(device), config)


def make_policy(model: Any, config: PolicyConfig) -> LanguageModelPolicy:
    """A policy of a transformers model that is in memory already; the model is changed (frozen, adapted)."""
    model.eval()
    if config.dtype == "float64" and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped products know no float64
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    frozen_copy = copy.deepcopy(model).requires_grad_(False) if config.reference == "copy" else None
    if config.lora_rank is not None:
        add_lora(
            model,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            targets=config.lora_targets,
            seed=config.lora_seed,
            setting="policy.lora_targets",
        )
    policy = LanguageModelPolicy(model, config, frozen_copy)
    policy.train()
    return policy


def _weight_dtype(config: PolicyConfig) -> torch.dtype:
    """Weights that are trained are not kept in bfloat16: small updates would be rounded away."""
    trained_in_full = config.lora_rank is None
    return torch.float32 if config.dtype == "bfloat16" and trained_in_full else getattr(torch, config.dtype)


def _source(name: str) -> str:
    if not name:
        raise UserError("policy.model is empty: name a folder made by save_pretrained(), or a model on the hub.")
    return resolve_model(
        name,
        no_folder=f"policy.model is {name!r}: there is no such folder. Name one that is there, or one on the hub.",
        no_model=f"policy.model is {name!r}: that folder holds no config.json, so no model.",
    )
