"""The language model that is sampled and trained: its weights, its LoRA adapter, its reference, its precision."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from groupwise.core.errors import UserError
from groupwise.dist.deferred_weights import (
    after_loading,
    defer_weights,
    defers_weights,
    files_in,
    is_deferred,
    without_weights,
)
from groupwise.dist.devices import move_module
from groupwise.dist.sharding import rollout_weights
from groupwise.workloads.chat.config import PolicyConfig
from groupwise.workloads.chat.engine.attention import AttentionLayout
from groupwise.workloads.chat.engine.forward import HiddenStatesFn, shared_prefix_forward
from groupwise.workloads.chat.engine.logprobs import OutputHead
from groupwise.workloads.chat.engine.packing import AttentionShape
from groupwise.workloads.hub import load_from_hub, resolve_model
from groupwise.workloads.lora import add_lora, without_lora


class LanguageModelPolicy(nn.Module):
    """A causal language model. Dropout is always off: otherwise the ratio would not be 1 before the first update."""

    def __init__(self, model: Any, config: PolicyConfig, reference_model: Any = None):
        super().__init__()
        self.model = model
        """The transformers model, with PEFT's layers in it where there is an adapter."""
        self.config = config
        # In tuples, so that torch does not register them: the reference is neither trained nor saved.
        self._reference_model = (reference_model,)
        self._current_model = (model,)
        self._forwards: tuple[HiddenStatesFn, ...] = ()
        """The shared-prefix forward of the policy, and of its reference model if there is one."""
        self.plain_reason: str | None = None
        """Why prompts are not shared; None where they are."""
        if is_deferred(model):
            after_loading(self, self._set_forward)
        else:
            self._set_forward()
        self.ignores_padding: bool | None = None
        """Whether rows of the plain path may be padded on the left; None until it is tried."""

    @property
    def causal_lm(self) -> Any:
        """The transformers model in use: the policy's, or the reference model within `reference()`."""
        return self._current_model[0]

    @property
    def reference_model(self) -> Any:
        """The frozen copy that the KL term compares with; None where policy.reference is not 'copy'."""
        return self._reference_model[0]

    @property
    def shares_prefix(self) -> bool:
        """Whether a prompt is computed once for all completions of it."""
        return self.plain_reason is None

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def attention_shape(self) -> AttentionShape:
        """Of the queries and keys that its layers attend with."""
        config, dtype = self.causal_lm.config.get_text_config(), getattr(torch, self.config.dtype)
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return AttentionShape(self.device.type, dtype, heads, key_heads, width)

    @property
    def max_positions(self) -> int | None:
        """Most tokens of a prompt and its completion together, by the model's configuration."""
        config = self.causal_lm.config
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            # Beyond this length other rotary factors apply to all positions, earlier tokens included: tokens would be
            # scored differently than they were sampled.
            return rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        return getattr(config, "max_position_embeddings", None)

    @property
    def head(self) -> OutputHead:
        """The layer that turns hidden states into logits."""
        layer, dtype = self.causal_lm.get_output_embeddings(), getattr(torch, self.config.dtype)
        return OutputHead(layer.weight, layer.bias, dtype)

    def hidden(self, ids: Tensor, position_ids: Tensor, layout: AttentionLayout) -> Tensor:
        """Hidden states before the head, [logit positions, width], of ids and position_ids [batch, tokens]."""
        is_reference_model = self._current_model is self._reference_model
        return self._forwards[is_reference_model](ids, position_ids, layout)

    def forward(self, ids: Tensor, **kwargs: Any) -> Any:
        """The whole model as transformers runs it, without shared prompts."""
        return self.causal_lm(input_ids=ids, **kwargs)

    @property
    def has_reference(self) -> bool:
        return self.config.reference != "none"

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within it the reference computes, without gradient."""
        assert self.has_reference, "the policy has no reference"
        with torch.no_grad(), without_lora(self.model) if self.config.reference == "adapter" else nullcontext():
            policy_model = self._current_model
            if self.reference_model is not None:
                self._current_model = self._reference_model
            try:
                yield
            finally:
                self._current_model = policy_model

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Within it nothing is kept for a backward pass; tensors made here cannot be trained on."""
        # In inference mode autocast does not cache cast weights: it would cast all of them again for every token.
        caches_casts = self.config.dtype == "bfloat16"
        with torch.no_grad() if caches_casts else torch.inference_mode(), self.autocast():
            self._set_gradient_checkpointing(False)
            try:
                yield
            finally:
                self._set_gradient_checkpointing(self.config.gradient_checkpointing)

    def autocast(self) -> AbstractContextManager[Any]:
        """Matrix products in bfloat16, if that is the policy's dtype."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16")

    def train(self, mode: bool = True) -> LanguageModelPolicy:
        """Modules always stay in evaluation mode: training and sampling compute the same function."""
        super().train(False)
        self._set_gradient_checkpointing(self.config.gradient_checkpointing)
        return self

    def _set_gradient_checkpointing(self, on: bool) -> None:
        """transformers checkpoints a layer that is in training mode; its submodules stay in evaluation mode."""
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = on

    def _set_forward(self) -> None:
        self.plain_reason = self._choose_forward()

    def _choose_forward(self) -> str | None:
        """Set up the shared-prefix forwards; where that is impossible, return the reason."""
        if self.config.forward == "plain":
            return "policy.forward is 'plain'"
        for model in (self.causal_lm, *([self.reference_model] if self.reference_model is not None else [])):
            with rollout_weights(self if model is self.model else model):
                forward = shared_prefix_forward(model)
            if not isinstance(forward, str):
                self._forwards = (*self._forwards, forward)
            elif self.config.forward == "shared_prefix":
                raise UserError(
                    f"policy.forward is 'shared_prefix', and {type(model).__name__} cannot share prompts: {forward}."
                    " Set policy.forward to 'auto' to train it with the slower plain forward."
                )
            else:
                return forward
        return None


def load_policy(config: PolicyConfig, device: torch.device | str = "cpu") -> LanguageModelPolicy:
    """Load the model from a folder or the hub, ready to be sampled and trained."""
    source = _resolve_source(config.folder_or_name)
    if defers_weights() and Path(source).is_dir():
        deferred = _load_without_weights(Path(source), _weight_dtype(config))
        if deferred is not None:
            return make_policy(deferred, config)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load_from_hub(
        source,
        lambda: load(
            source,
            dtype=_weight_dtype(config),
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
        ),
        called=f"policy.model is {source!r}, which",
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"policy.model {source!r} lacks {len(missing)} of its weights, {missing[0]} among them: they would be"
            " random. Download all files of the model again."
        )
    return make_policy(move_module(model, device), config)


def _load_without_weights(folder: Path, dtype: torch.dtype) -> Any:
    """The model with its weights still in the folder's files; None where transformers would change them on loading."""
    files = files_in(folder, "model")
    settings = load_from_hub(
        str(folder),
        lambda: transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False),
        called=f"policy.model is {str(folder)!r}, which",
    )
    if files is None or type(settings) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    with without_weights(), no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32, trust_remote_code=False)
    model.tie_weights()
    for weight in model.parameters():  # alone: transformers computes buffers in float32
        weight.data = weight.data.to(dtype)
    converted = any(isinstance(each, WeightConverter) for each in get_model_conversion_mapping(model))
    kept_in_float32 = model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict
    if converted or (kept_in_float32 and dtype in (torch.bfloat16, torch.float16)) or not defer_weights(model, files):
        return None
    with suppress(OSError):  # a folder need not have one
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def make_policy(model: Any, config: PolicyConfig) -> LanguageModelPolicy:
    """A policy around a transformers model that is already in memory. The model is changed: frozen, adapted."""
    model.eval()
    if config.dtype == "float64" and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped matrix products have no float64
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    reference_model = copy.deepcopy(model).requires_grad_(False) if config.reference == "copy" else None
    if config.lora_rank is not None:
        add_lora(
            model,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            targets=config.lora_targets,
            seed=config.lora_seed,
            setting="policy.lora_targets",
        )
    policy = LanguageModelPolicy(model, config, reference_model)
    policy.train()
    return policy


def _weight_dtype(config: PolicyConfig) -> torch.dtype:
    """Trained weights are not stored in bfloat16: it would round small updates away."""
    trains_all_weights = config.lora_rank is None
    return torch.float32 if config.dtype == "bfloat16" and trains_all_weights else getattr(torch, config.dtype)


def _resolve_source(name: str) -> str:
    if not name:
        raise UserError("policy.model is empty: name a folder made by save_pretrained(), or a model on the hub.")
    return resolve_model(
        name,
        no_folder=f"policy.model is {name!r}: there is no such folder. Name one that is there, or one on the hub.",
        no_model=f"policy.model is {name!r}: that folder holds no config.json, so no model.",
    )
