"""AdamW with its moments in host memory: those of one weight at a time are on the device, while it is updated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from groupwise.dist.devices import traits
from groupwise.dist.sharding import local

_MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.AdamW):
    """The same update as AdamW. Of a sharded weight it keeps the moments of this rank's part, as plain tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    _update(local(weight), local(weight.grad), self._state_of(weight), group)

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        fields: dict[str, Tensor] = self.state[weight]
        if not fields:
            fields["step"] = torch.zeros(())
            fields |= {name: host_moment(weight) for name in _MOMENTS}
        return fields


def host_moment(weight: Tensor) -> Tensor:
    """Zeros of the weight's part on the host, in pinned memory where the device copies from it."""
    part = local(weight.detach())
    return torch.zeros(part.shape, dtype=part.dtype, pin_memory=traits(part.device).copies_from_pinned)


def _update(weight: Tensor, gradient: Tensor, fields: dict[str, Tensor], group: dict[str, Any]) -> None:
    on_device = {name: value.to(weight.device) for name, value in fields.items()}
    step = on_device["step"] if group["fused"] else fields["step"]
    adamw(
        [weight],
        [gradient],
        [on_device["exp_avg"]],
        [on_device["exp_avg_sq"]],
        [],
        [step],
        fused=group["fused"],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for name, value in {**on_device, "step": step}.items():
        if value is not fields[name]:
            fields[name].copy_(value)
