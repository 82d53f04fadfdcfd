"""Experts inside transformers' blocks: where they are, and how a router behaves when fewer of its choices are kept."""

from __future__ import annotations

import inspect
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from groupwise.core.errors import UserError

_PROBED_TOKENS = 64
_TOLERANCE = 1e-2
"""Of a sum of weights near 1, also in bfloat16."""
_ROUTER_NAMES = ("gate", "router")


@dataclass(frozen=True)
class RouterRule:
    """How the choices of a smaller top-k follow from those of the full one."""

    sorts: bool = False
    """The router returns its choices in no order: the best are those of the largest weight."""
    renormalizes: bool = False
    """Whatever the number of choices, the sum of their weights is the same."""

    def reduce(
        self, weights: Float[Tensor, "tokens k"], kept: Tensor, total: Float[Tensor, "tokens 1"] | None = None
    ) -> Float[Tensor, "tokens k"]:
        """The weights of the kept choices, as the model would give them with so many experts."""
        if not self.renormalizes:
            return weights
        total = weights.sum(1, keepdim=True) if total is None else total
        reduced = weights * kept
        return reduced * (total / reduced.sum(1, keepdim=True))


def expert_module(block: nn.Module) -> Any:
    """The part of a block that has a router and experts; None in a dense block."""
    return next((part for part in block.children() if hasattr(part, "experts") and router_of(part) is not None), None)


def router_of(module: Any) -> Any:
    """The router beside the experts, which has their number per token as `top_k`."""
    routers = [getattr(module, name, None) for name in _ROUTER_NAMES]
    return next((router for router in routers if isinstance(getattr(router, "top_k", None), int)), None)


def mark_router_rules(blocks: nn.ModuleList) -> None:
    """Store each block's rule beside its experts, where the packed experts find it; refuse experts of another kind."""
    for block in blocks:
        module = expert_module(block)
        if module is not None:
            _check_supported_experts(module.experts)
            module.experts.groupwise_rule = router_rule(router_of(module))


def _check_supported_experts(experts: Any) -> None:
    """Refuse experts that are more than two gated matrices: the answers would not be the model's."""
    reasons = {
        "have biases": getattr(experts, "has_bias", False),
        "are stored transposed": getattr(experts, "is_transposed", False),
        "have a norm of their own": getattr(experts, "has_post_expert_norm", False),
        "have no gate": not getattr(experts, "has_gate", True),
        "have interleaved gates": not getattr(experts, "is_concatenated", True),
    }
    unsupported = [reason for reason, is_so in reasons.items() if is_so]
    if unsupported:
        raise UserError(
            f"A model with {type(experts).__name__} cannot be controlled: its experts {', '.join(unsupported)}. The"
            " executor runs gated experts without. Take a model that docs/model-families.md lists as equal."
        )


@torch.no_grad()
def router_rule(router: Any) -> RouterRule | None:
    """The first rule that agrees with the router itself on random tokens, with each smaller top-k; None if none does.

    Routers that choose by other numbers than the weights they return, such as scores with a correction, have no rule
    unless they return their choices in order.
    """
    if any(weight.is_meta or isinstance(weight, FakeTensor) for weight in router.parameters()):
        return RouterRule(sorts=False, renormalizes=bool(getattr(router, "norm_topk_prob", False)))  # nothing to try
    states = _probe_states(router)
    if states is None or len(inspect.signature(router.forward).parameters) != 1:
        return None
    full = _choices(router, states, router.top_k)
    if full is None:
        return None
    smaller = [_choices(router, states, top_k) for top_k in range(1, router.top_k)]
    for rule in [RouterRule(sorts, renormalizes) for sorts in (False, True) for renormalizes in (False, True)]:
        if all(choice is not None and _agrees(rule, full, choice) for choice in smaller):
            return rule
    return None


def _probe_states(router: Any) -> Float[Tensor, "tokens width"] | None:
    weights = [weight for weight in router.parameters() if weight.ndim == 2]
    if not weights:
        return None
    weight = weights[0]
    width = weight.shape[1]
    noise = torch.randn(_PROBED_TOKENS, width, generator=torch.Generator().manual_seed(0))
    return noise.to(weight.device, weight.dtype)


Choices = tuple[Float[Tensor, "tokens k"], Int64[Tensor, "tokens k"]]


def _choices(router: Any, states: Tensor, top_k: int) -> Choices | None:
    """Weights and experts, if the router returns them as transformers' routers mostly do, after its logits."""
    asked = copy(router)
    asked.top_k = top_k
    output = asked(states)
    if not isinstance(output, tuple) or len(output) != 3:
        return None
    _, weights, experts = output
    shape = (len(states), top_k)
    if tuple(weights.shape) != shape or tuple(experts.shape) != shape or experts.is_floating_point():
        return None
    return weights.float(), experts


def _agrees(rule: RouterRule, full: Choices, smaller: Choices) -> bool:
    """Whether the first choices of the full top-k are the smaller one's, with its weights."""
    weights, experts = full
    top_k = smaller[0].shape[1]
    if rule.sorts:
        weights, order = weights.sort(dim=1, descending=True, stable=True)
        experts = experts.gather(1, order)
    kept = torch.arange(weights.shape[1], device=weights.device) < top_k
    by_expert = experts[:, :top_k].sort(dim=1)
    expected_by_expert = smaller[1].sort(dim=1)
    if not torch.equal(by_expert.values, expected_by_expert.values):
        return False
    reduced = rule.reduce(weights, kept)[:, :top_k].gather(1, by_expert.indices)
    expected = smaller[0].gather(1, expected_by_expert.indices)
    scale = expected.abs().sum(1, keepdim=True).clamp(min=1e-6)
    return bool(((reduced - expected).abs() <= _TOLERANCE * scale).all())
