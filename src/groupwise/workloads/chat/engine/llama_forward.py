"""A shorter forward for Llama-like models (Llama, Mistral, Qwen2, Qwen3, ...), with fewer operators and Python calls.

A decoding step has so little arithmetic that Python calls and kernel launches cost more. In training, hand-written
gradients of norms and rotary embeddings move and keep less memory. Modules, weights and adapters are the model's own.
`shared_prefix_forward` compares the result with the model's forward before it is used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groupwise.dist.sharding import call_block, is_sharded
from groupwise.workloads.chat.engine.attention import AttentionLayout, layout_attention

Values = Float[Tensor, "*batch width"]
Rotary = tuple[Float[Tensor, "batch tokens 1 width"], Float[Tensor, "batch tokens 1 width"]]
"""Cosine, and sine with its first half negated."""

_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_GATED_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class LlamaForward:
    """Hidden states of a base model: a `HiddenStatesFn`."""

    def __init__(self, base_model: Any):
        self.model = base_model
        self.layers = [_LlamaLayer(layer) for layer in base_model.layers]

    def __call__(self, ids: Tensor, position_ids: Tensor, layout: AttentionLayout) -> Tensor:
        hidden = self.model.embed_tokens(ids)
        rotary = rotary_tables(*self.model.rotary_emb(hidden, position_ids=position_ids))
        hidden = hidden.flatten(0, 1)  # matrix products of two axes are the cheapest to call
        for layer in self.layers:
            # After the last attention, only tokens whose logits are needed go on.
            logit_positions = layout.logit_positions if layer is self.layers[-1] else None
            inputs = hidden, rotary, layout, logit_positions
            if layer.module.training and torch.is_grad_enabled():  # how transformers marks gradient checkpointing
                hidden = call_block(layer.module, partial(checkpoint, layer, use_reentrant=False), *inputs)
            else:
                hidden = call_block(layer.module, layer, *inputs)
        return _norm(self.model.norm, hidden)


class _LlamaLayer:
    def __init__(self, module: Any):
        self.module, self.attention, self.mlp = module, module.self_attn, module.mlp
        self.input_projections = tuple(getattr(module.self_attn, name) for name in ("q_proj", "k_proj", "v_proj"))
        self.output_projection = module.self_attn.o_proj
        self.attention_norm, self.mlp_norm = module.input_layernorm, module.post_attention_layernorm
        self.head_norms = tuple(getattr(module.self_attn, name, None) for name in ("q_norm", "k_norm"))
        self.head_width, self.scale = module.self_attn.head_dim, module.self_attn.scaling
        self.gated_mlp = (
            (module.mlp.gate_proj, module.mlp.act_fn, module.mlp.up_proj, module.mlp.down_proj)
            if _children(module.mlp) == _GATED_MLP
            else None
        )

    def __call__(
        self, hidden: Tensor, rotary: Rotary, layout: AttentionLayout, logit_positions: Tensor | None
    ) -> Tensor:
        """Hidden states after this layer, of all tokens or of those at `logit_positions`."""
        attended = self._attend(_norm(self.attention_norm, hidden), rotary, layout)
        if logit_positions is not None:
            hidden, attended = hidden.index_select(0, logit_positions), attended.index_select(0, logit_positions)
        hidden = hidden + _linear(self.output_projection, attended)
        normed = _norm(self.mlp_norm, hidden)
        if self.gated_mlp is not None:
            return hidden + _gated_mlp(*self.gated_mlp, normed)
        return hidden + self.mlp(normed[None])[0]

    def _attend(self, normed: Tensor, rotary: Rotary, layout: AttentionLayout) -> Tensor:
        by_head = (*rotary[0].shape[:2], -1, self.head_width)
        query, key, value = [_linear(projection, normed).view(by_head) for projection in self.input_projections]
        if self.head_norms[0] is not None:
            query, key = _norm(self.head_norms[0], query), _norm(self.head_norms[1], key)
        query, key, value = (
            apply_rotary(query, rotary).transpose(1, 2),
            apply_rotary(key, rotary).transpose(1, 2),
            value.transpose(1, 2),
        )
        out, _ = layout_attention(self.attention, query, key, value, None, scaling=self.scale, layout=layout)
        return out.flatten(2).flatten(0, 1)


def llama_forward(base_model: Any) -> LlamaForward | None:
    """The shorter forward of a model with Llama's modules; None for other models.

    Equal module names do not prove an equal computation: the caller compares the outputs.
    """
    if _children(base_model) != _MODEL:
        return None
    if any(_has_hooks(module) for module in base_model.modules() if module is not base_model.embed_tokens):
        return None
    return LlamaForward(base_model) if all(map(_is_llama_layer, base_model.layers)) else None


def _is_llama_layer(layer: Any) -> bool:
    if _children(layer) != _LAYER or _children(layer.self_attn) not in (_ATTENTION, _ATTENTION | _HEAD_NORMS):
        return False
    head_norms = [getattr(layer.self_attn, name) for name in _HEAD_NORMS & _children(layer.self_attn)]
    if any(norm.weight.shape != (layer.self_attn.head_dim,) for norm in head_norms):  # one norm over all heads
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *head_norms]
    return all(hasattr(norm, "variance_epsilon") for norm in norms) and hasattr(layer.self_attn, "scaling")


def _children(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def _has_hooks(module: nn.Module) -> bool:
    """Hooks run only when a module is called, which the shorter forward does not; `call_block` runs those of FSDP."""
    return bool(module._forward_hooks or module._forward_pre_hooks) and not is_sharded(module)


def _linear(module: Any, values: Tensor) -> Tensor:
    """A plain linear layer without `Module.__call__`; other modules (adapters) are called."""
    if type(module) is nn.Linear:
        parameters: Any = module._parameters  # attribute access would go through Module.__getattr__
        return nn.functional.linear(values, parameters["weight"], parameters["bias"])
    out: Tensor = module(values)
    return out


def _gated_mlp(gate: Any, activation: Any, up: Any, down: Any, values: Tensor) -> Tensor:
    gated, raised = activation(_linear(gate, values)), _linear(up, values)
    return _linear(down, gated * raised if torch.is_grad_enabled() else gated.mul_(raised))


def _norm(module: Any, values: Tensor) -> Tensor:
    return rms_norm(values, module._parameters["weight"], module.variance_epsilon)


def rms_norm(values: Values, weight: Float[Tensor, " width"], epsilon: float) -> Values:
    """Root mean square norm, computed in float32 as transformers does."""
    if torch.is_grad_enabled():
        normed: Tensor = _RMSNorm.apply(values, weight, epsilon)
        return normed
    if values.dtype == weight.dtype == torch.float32:
        return torch.rms_norm(values, weight.shape, weight, epsilon)
    return _scale_by_weight(values, _inverse_rms(values, epsilon), weight)


class _RMSNorm(torch.autograd.Function):
    """y = w n with n = x r and r = 1 / sqrt(mean(x^2) + eps); dx = r (h - n mean(h n)) with h = w dy; dw = sum dy n."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        inverse_rms = _inverse_rms(values, epsilon)
        ctx.save_for_backward(values, weight, inverse_rms)
        return _scale_by_weight(values, inverse_rms, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, inverse_rms = ctx.saved_tensors
        exact = torch.promote_types(values.dtype, torch.float32)
        grad, normed = grads[0].to(exact), values.to(exact) * inverse_rms
        grad_normed = grad * weight
        projection = torch.linalg.vecdot(grad_normed, normed).div_(values.shape[-1])[..., None]
        grad_values = grad_normed.addcmul_(normed, projection, value=-1).mul_(inverse_rms).to(values.dtype)
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_values, grad_weight, None


def _inverse_rms(values: Values, epsilon: float) -> Tensor:
    return values.to(torch.float32).pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()


def _scale_by_weight(values: Values, inverse_rms: Tensor, weight: Tensor) -> Tensor:
    return weight * (values.to(torch.float32) * inverse_rms).to(values.dtype)


def rotary_tables(cos: Float[Tensor, "batch tokens width"], sin: Float[Tensor, "batch tokens width"]) -> Rotary:
    """transformers' rotary embeddings in the form that `apply_rotary` takes, for all heads of all layers."""
    first, second = sin.chunk(2, -1)
    return cos[:, :, None], torch.cat((-first, second), -1)[:, :, None]


def apply_rotary(values: Float[Tensor, "batch tokens heads width"], rotary: Rotary) -> Tensor:
    """Rotate queries or keys by their positions."""
    if torch.is_grad_enabled():
        rotated: Tensor = _Rotary.apply(values, *rotary)
        return rotated
    return _rotate(values, *rotary)


class _Rotary(torch.autograd.Function):
    """y = x cos + swap(x) sin, where swap exchanges the halves; dx = dy cos + swap(dy sin)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = values.dtype
        return _rotate(values, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return (grads[0] * cos).add_(_swap_halves(grads[0] * sin)).to(ctx.dtype), None, None


def _rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(values * cos, _swap_halves(values), sin)


def _swap_halves(values: Tensor) -> Tensor:
    first, second = values.chunk(2, -1)
    return torch.cat((second, first), -1)
