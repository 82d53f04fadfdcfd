"""The forward of models of Llama's build (Llama, Mistral, Qwen2, Qwen3 ...) in fewer operators and calls.

A decoding step is so little arithmetic that the calls around it cost more: in Python here, as launches on a GPU. In
training, norms and rotary positions by their own gradients move less memory. Modules, weights and adapters are the
model's, the result is the same to rounding, and `share_prompts` compares it with the model's own forward before use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groupwise.workloads.chat.attention import Layout, shared_attention
from groupwise.workloads.chat.pieces import Rotation, normalised, rotated, rotation

_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class LeanForward:
    """Hidden states of a base model; called like `Policy.hidden`."""

    def __init__(self, base_model: Any):
        self.model = base_model
        self.layers = [_Layer(layer) for layer in base_model.layers]

    def __call__(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        hidden = self.model.embed_tokens(ids)
        turn = rotation(*self.model.rotary_emb(hidden, position_ids=positions))
        hidden = hidden.flatten(0, 1)  # products of matrices need no thought about further axes
        for layer in self.layers:
            wanted = layout.predicting if layer is self.layers[-1] else None
            told = hidden, turn, layout, wanted
            if layer.module.training and torch.is_grad_enabled():  # transformers' sign for gradient checkpointing
                hidden = checkpoint(layer, *told, use_reentrant=False)
            else:
                hidden = layer(*told)
        return _norm(self.model.norm, hidden)


class _Layer:
    def __init__(self, module: Any):
        self.module, self.attention, self.mlp = module, module.self_attn, module.mlp
        self.projections = tuple(getattr(module.self_attn, name) for name in ("q_proj", "k_proj", "v_proj"))
        self.out = module.self_attn.o_proj
        self.before, self.after = module.input_layernorm, module.post_attention_layernorm
        self.head_norms = tuple(getattr(module.self_attn, name, None) for name in ("q_norm", "k_norm"))
        self.head_width, self.scale = module.self_attn.head_dim, module.self_attn.scaling
        self.gate = (
            (module.mlp.gate_proj, module.mlp.act_fn, module.mlp.up_proj, module.mlp.down_proj)
            if _children(module.mlp) == _GATED
            else None
        )

    def __call__(self, hidden: Tensor, turn: Rotation, layout: Layout, wanted: Tensor | None) -> Tensor:
        """The states after this layer, of the wanted tokens only where some are named."""
        attended = self._attended(_norm(self.before, hidden), turn, layout)
        if wanted is not None:
            hidden, attended = hidden.index_select(0, wanted), attended.index_select(0, wanted)
        hidden = hidden + _linear(self.out, attended)
        normed = _norm(self.after, hidden)
        if self.gate is not None:
            return hidden + _gated(*self.gate, normed)
        return hidden + self.mlp(normed[None])[0]

    def _attended(self, normed: Tensor, turn: Rotation, layout: Layout) -> Tensor:
        by_head = (*turn[0].shape[:2], -1, self.head_width)
        query, key, value = [_linear(each, normed).view(by_head) for each in self.projections]
        if self.head_norms[0] is not None:
            query, key = _norm(self.head_norms[0], query), _norm(self.head_norms[1], key)
        query, key, value = (
            rotated(query, turn).transpose(1, 2),
            rotated(key, turn).transpose(1, 2),
            value.transpose(1, 2),
        )
        seen, _ = shared_attention(self.attention, query, key, value, None, scaling=self.scale, layout=layout)
        return seen.flatten(2).flatten(0, 1)


def lean_forward(base_model: Any) -> LeanForward | None:
    """The lean forward of a model that is built so; None for others. Whether it computes the same is still to check."""
    if _children(base_model) != _MODEL:
        return None
    if any(_has_hooks(module) for module in base_model.modules() if module is not base_model.embed_tokens):
        return None
    return LeanForward(base_model) if all(map(_is_of_the_build, base_model.layers)) else None


def _is_of_the_build(layer: Any) -> bool:
    if _children(layer) != _LAYER or _children(layer.self_attn) not in (_ATTENTION, _ATTENTION | _HEAD_NORMS):
        return False
    head_norms = [getattr(layer.self_attn, name) for name in _HEAD_NORMS & _children(layer.self_attn)]
    if any(norm.weight.shape != (layer.self_attn.head_dim,) for norm in head_norms):  # of all heads together
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *head_norms]
    return all(hasattr(norm, "variance_epsilon") for norm in norms) and hasattr(layer.self_attn, "scaling")


def _children(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def _has_hooks(module: nn.Module) -> bool:
    """Somebody counts on being called: where modules are not called, they would wait in vain."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _linear(module: Any, values: Tensor) -> Tensor:
    """A plain linear layer without the calls around it; an adapter as it is."""
    if type(module) is nn.Linear:
        parts: Any = module._parameters  # by name they would be looked for in Python
        return nn.functional.linear(values, parts["weight"], parts["bias"])
    found: Tensor = module(values)
    return found


def _gated(gate: Any, activation: Any, up: Any, down: Any, values: Tensor) -> Tensor:
    opened, raised = activation(_linear(gate, values)), _linear(up, values)
    return _linear(down, opened * raised if torch.is_grad_enabled() else opened.mul_(raised))


def _norm(module: Any, values: Tensor) -> Tensor:
    return normalised(values, module._parameters["weight"], module.variance_epsilon)
