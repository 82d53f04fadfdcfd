"""What the flow workload asks of a model."""

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
"""What the transformer is told besides latents and noise level, by name; one condition's, or those of many rows."""
NEGATIVE_PREFIX = "unprompted_"
"""Names that begin with this take the place of the others in the pass without the prompt (guidance)."""


class FlowModel(Protocol):
    policy: nn.Module
    """The transformer."""
    asked: ConditionSpec

    def encode(self, conditions: Sequence[Condition]) -> list[Conditioning]:
        """What the transformer is told of each condition, kept off its device."""
        ...

    def velocity(
        self, latents: Float[Tensor, "rows ..."], sigma: Float[Tensor, " rows"], encoding: Conditioning
    ) -> Float[Tensor, "rows ..."]:
        """noise - clean, in float32."""
        ...

    def decode(self, latents: Float[Tensor, "rows ..."]) -> Float[Tensor, "rows channels *shown"]:
        """Clips, or pictures, in -1..1, on the CPU."""
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Meanwhile the policy is the one that training began with."""
        ...


@dataclass(frozen=True)
class GuidedVelocity:
    """The policy's velocity of some rows, under classifier-free guidance: without + guidance x (with - without).

    Both come from one pass; at guidance 1 the model is only asked with the prompt.
    """

    model: FlowModel
    encoding: Conditioning
    """What is known of each row's condition, with and without its prompt."""
    guidance: float = 1.0

    def __call__(self, latents: Float[Tensor, "rows ..."], sigma: Float[Tensor, " rows"]) -> Float[Tensor, "rows ..."]:
        if self.guidance == 1:
            return self.model.velocity(latents, sigma, self._told)
        twice = latents.repeat(2, *[1] * (latents.ndim - 1))
        given, without = self.model.velocity(twice, sigma.repeat(2), self._told).chunk(2)
        return without + self.guidance * (given - without)

    def of(self, rows: Int64[Tensor, " some"]) -> GuidedVelocity:
        """The same of these rows alone, in this order."""
        return replace(self, encoding={name: column[rows] for name, column in self.encoding.items()})

    @cached_property
    def _told(self) -> Conditioning:
        """What the model is told in every step: put together once."""
        told = {name: column for name, column in self.encoding.items() if not name.startswith(NEGATIVE_PREFIX)}
        if self.guidance == 1:
            return told
        instead = {name: self.encoding.get(f"{NEGATIVE_PREFIX}{name}", column) for name, column in told.items()}
        return {name: torch.cat([column, instead[name]]) for name, column in told.items()}
