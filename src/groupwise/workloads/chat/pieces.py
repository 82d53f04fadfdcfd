"""The small operators of a transformer layer, each with its gradient by hand: fewer passes over memory, less kept.

Norm: y = w x r with r = 1 / sqrt(mean(x^2) + eps), n = x r; then dx = r (h - n mean(h n)) with h = w dy, dw = sum dy n.
Rotary positions: y = x cos + swap(x) sin, where swap exchanges the halves and sin bears the sign of the first;
then dx = dy cos + swap(dy sin).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

Values = Float[Tensor, "*batch width"]
Rotation = tuple[Float[Tensor, "batch tokens 1 width"], Float[Tensor, "batch tokens 1 width"]]
"""Cosine, and sine with a minus in its first half."""


def normalised(values: Values, weight: Float[Tensor, " width"], epsilon: float) -> Values:
    """Root mean square norm, in float32 as transformers computes it."""
    if torch.is_grad_enabled():
        found: Tensor = _Normalised.apply(values, weight, epsilon)
        return found
    if values.dtype == weight.dtype == torch.float32:
        return torch.rms_norm(values, weight.shape, weight, epsilon)
    return _times_weight(values, _inverse_root(values, epsilon), weight)


def rotation(cos: Float[Tensor, "batch tokens width"], sin: Float[Tensor, "batch tokens width"]) -> Rotation:
    """transformers' rotary positions, ready for all heads of all layers."""
    first, second = sin.chunk(2, -1)
    return cos[:, :, None], torch.cat((-first, second), -1)[:, :, None]


def rotated(values: Float[Tensor, "batch tokens heads width"], turn: Rotation) -> Tensor:
    """Queries or keys turned by their positions."""
    if torch.is_grad_enabled():
        found: Tensor = _Rotated.apply(values, *turn)
        return found
    return _turned(values, *turn)


def _inverse_root(values: Values, epsilon: float) -> Tensor:
    return values.to(torch.float32).pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()


def _times_weight(values: Values, inverse_root: Tensor, weight: Tensor) -> Tensor:
    return weight * (values.to(torch.float32) * inverse_root).to(values.dtype)


def _turned(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(values * cos, _swapped(values), sin)


def _swapped(values: Tensor) -> Tensor:
    first, second = values.chunk(2, -1)
    return torch.cat((second, first), -1)


class _Normalised(torch.autograd.Function):
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


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = values.dtype
        return _turned(values, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        first, second = (grads[0] * sin).chunk(2, -1)
        return (grads[0] * cos).add_(torch.cat((second, first), -1)).to(ctx.dtype), None, None
