"""FlowModel, the protocol that models of the flow workload follow, and classifier-free guidance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from groupwise.workloads.flow.task import Condition, ConditionSpec

Conditioning = Mapping[str, Tensor]
"""The transformer's inputs besides latents and noise level, by name: of one condition, or of many rows."""
NEGATIVE_PREFIX = "negative_"
"""An input with this prefix replaces the one without it in the pass for the negative prompt."""


class FlowModel(Protocol):
    policy: nn.Module
    """The transformer."""
    condition_spec: ConditionSpec

    def encode(self, conditions: Sequence[Condition]) -> list[Conditioning]:
        """The conditioning of each condition, on the CPU."""
        ...

    def velocity(
        self, latents: Float[Tensor, "rows ..."], sigma: Float[Tensor, " rows"], conditioning: Conditioning
    ) -> Float[Tensor, "rows ..."]:
        """noise - clean, in float32."""
        ...

    def decode(self, latents: Float[Tensor, "rows ..."]) -> Float[Tensor, "rows channels *shown"]:
        """Clips or images in -1..1, on the CPU."""
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Within this context the policy has its initial weights."""
        ...


@dataclass(frozen=True)
class GuidedVelocity:
    """The policy's velocity under classifier-free guidance: negative + guidance_scale (positive - negative).

    Both come from one pass; at guidance_scale 1 only the positive one is computed.
    """

    model: FlowModel
    conditioning: Conditioning
    """Of each row, for the prompt and for the negative prompt."""
    guidance_scale: float = 1.0

    def __call__(self, latents: Float[Tensor, "rows ..."], sigma: Float[Tensor, " rows"]) -> Float[Tensor, "rows ..."]:
        if self.guidance_scale == 1:
            return self.model.velocity(latents, sigma, self._model_inputs)
        twice = latents.repeat(2, *[1] * (latents.ndim - 1))
        positive, negative = self.model.velocity(twice, sigma.repeat(2), self._model_inputs).chunk(2)
        return negative + self.guidance_scale * (positive - negative)

    def select(self, rows: Int64[Tensor, " some"]) -> GuidedVelocity:
        """The velocity for these rows only, in this order."""
        return replace(self, conditioning={name: column[rows] for name, column in self.conditioning.items()})

    @cached_property
    def _model_inputs(self) -> Conditioning:
        """The same in every step, so they are concatenated once."""
        columns = self.conditioning
        positive = {name: column for name, column in columns.items() if not name.startswith(NEGATIVE_PREFIX)}
        if self.guidance_scale == 1:
            return positive
        return {
            name: torch.cat([column, columns.get(f"{NEGATIVE_PREFIX}{name}", column)])
            for name, column in positive.items()
        }
