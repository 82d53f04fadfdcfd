"""The forward of models of Llama's build (Llama, Mistral, Qwen2, Qwen3 ...) in fewer operators and calls.

A decoding step is so little arithmetic that the calls around it cost more: in Python here, as launches on a GPU. In
training, norms and rotary positions by their own gradients move less memory. Modules, weights and adapters are the
model's, the result is the same to rounding, and `shared_prefix_forward` compares it with the model's own
forward before use.
The small operators of a transformer layer, each with its gradient by hand: fewer passes over memory, less kept.

Norm: y = w x r with r = 1 / sqrt(mean(x^2) + eps), n = x r; then dx = r (h - n mean(h n)) with h = w dy, dw = sum dy n.
Rotary positions: y = x cos + swap(x) sin, where swap exchanges the halves and sin bears the sign of the first;
then dx = dy cos + swap(dy sin).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groupwise.workloads.chat.engine.attention import Layout, layout_attention

Values = Float[Tensor, "*batch width"]
Rotation = tuple[Float[Tensor, "batch tokens 1 width"], Float[Tensor, "batch tokens 1 width"]]
"""Cosine, and sine with a minus in its first half."""


def rms_norm(values: Values, weight: Float[Tensor, " width"], epsilon: float) -> Values:
    """Root mean square norm, in float32 as transformers computes it."""
    if torch.is_grad_enabled():
        found: Tensor = _RMSNorm.apply(values, weight, epsilon)
        return found
    if values.dtype == weight.dtype == torch.float32:
        return torch.rms_norm(values, weight.shape, weight, epsilon)
    return _times_weight(values, _inverse_root(values, epsilon), weight)


def rotary_tables(cos: Float[Tensor, "batch tokens width"], sin: Float[Tensor, "batch tokens width"]) -> Rotation:
    """transformers' rotary positions, ready for all heads of all layers."""
    first, second = sin.chunk(2, -1)
    return cos[:, :, None], torch.cat((-first, second), -1)[:, :, None]


def apply_rotary(values: Float[Tensor, "batch tokens heads width"], turn: Rotation) -> Tensor:
    """Queries or keys turned by their positions."""
    if torch.is_grad_enabled():
        found: Tensor = _Rotary.apply(values, *turn)
        return found
    return _rotate(values, *turn)


def _inverse_root(values: Values, epsilon: float) -> Tensor:
    return values.to(torch.float32).pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()


def _times_weight(values: Values, inverse_root: Tensor, weight: Tensor) -> Tensor:
    return weight * (values.to(torch.float32) * inverse_root).to(values.dtype)


def _rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(values * cos, _swapped(values), sin)


def _swapped(values: Tensor) -> Tensor:
    first, second = values.chunk(2, -1)
    return torch.cat((second, first), -1)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        inverse_root = _inverse_root(values, epsilon)
        ctx.save_for_backward(values, weight, inverse_root)
        return _times_weight(values, inverse_root, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, inverse_root = ctx.saved_tensors
        exact = torch.promote_types(values.dtype, torch.float32)
        grad, normed = grads[0].to(exact), values.to(exact) * inverse_root
        by_normed = grad * weight
        pull = torch.linalg.vecdot(by_normed, normed).div_(values.shape[-1])[..., None]
        by_values = by_normed.addcmul_(normed, pull, value=-1).mul_(inverse_root).to(values.dtype)
        by_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return by_values, by_weight, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = values.dtype
        return _rotate(values, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        first, second = (grads[0] * sin).chunk(2, -1)
        return (grads[0] * cos).add_(torch.cat((second, first), -1)).to(ctx.dtype), None, None


_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class LlamaForward:
    """Hidden states of a base model; called like `Policy.hidden`."""

    def __init__(self, base_model: Any):
        self.model = base_model
        self.layers = [_Layer(layer) for layer in base_model.layers]

    def __call__(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        hidden = self.model.embed_tokens(ids)
        turn = rotary_tables(*self.model.rotary_emb(hidden, position_ids=positions))
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
            return hidden + _gated_mlp(*self.gate, normed)
        return hidden + self.mlp(normed[None])[0]

    def _attended(self, normed: Tensor, turn: Rotation, layout: Layout) -> Tensor:
        by_head = (*turn[0].shape[:2], -1, self.head_width)
        query, key, value = [_linear(each, normed).view(by_head) for each in self.projections]
        if self.head_norms[0] is not None:
            query, key = _norm(self.head_norms[0], query), _norm(self.head_norms[1], key)
        query, key, value = (
            apply_rotary(query, turn).transpose(1, 2),
            apply_rotary(key, turn).transpose(1, 2),
            value.transpose(1, 2),
        )
        seen, _ = layout_attention(self.attention, query, key, value, None, scaling=self.scale, layout=layout)
        return seen.flatten(2).flatten(0, 1)


def llama_forward(base_model: Any) -> LlamaForward | None:
    """The lean forward of a model that is built so; None for others. Whether it computes the same is still to check."""
    if _children(base_model) != _MODEL:
        return None
    if any(_has_hooks(module) for module in base_model.modules() if module is not base_model.embed_tokens):
        return None
    return LlamaForward(base_model) if all(map(_is_llama_layer, base_model.layers)) else None


def _is_llama_layer(layer: Any) -> bool:
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


def _gated_mlp(gate: Any, activation: Any, up: Any, down: Any, values: Tensor) -> Tensor:
    opened, raised = activation(_linear(gate, values)), _linear(up, values)
    return _linear(down, opened * raised if torch.is_grad_enabled() else opened.mul_(raised))


def _norm(module: Any, values: Tensor) -> Tensor:
    return rms_norm(values, module._parameters["weight"], module.variance_epsilon)
