"""What the flow workload asks of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from groupwise.workloads.flow.conditions import Asked, Condition

Encoding = Mapping[str, Tensor]
"""What the transformer is told besides latents and noise level, by name; one condition's, or those of many rows."""
UNPROMPTED = "unprompted_"
"""Names that begin with this take the place of the others in the pass without the prompt (guidance)."""


class FlowModel(Protocol):
    policy: nn.Module
    """The transformer."""
    asked: Asked

    def encode(self, conditions: Sequence[Condition]) -> list[Encoding]:
        """What the transformer is told of each condition, kept off its device."""
        ...

    def velocity(
        self, latents: Float[Tensor, "rows ..."], sigma: Float[Tensor, " rows"], encoding: Encoding
    ) -> Float[Tensor, "rows ..."]:
        """noise - clean, in float32."""
        ...

    def decode(self, latents: Float[Tensor, "rows ..."]) -> Float[Tensor, "rows channels *shown"]:
        """Clips, or pictures, in -1..1, on the CPU."""
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Meanwhile the policy is the one that training began with."""
        ...


def guided_velocity(
    model: FlowModel, latents: Tensor, sigma: Tensor, encoding: Encoding, *, guidance: float
) -> Float[Tensor, "rows ..."]:
    """Classifier-free guidance: without + guidance x (with - without), in one pass; at guidance 1 only `with`."""
    told = {name: column for name, column in encoding.items() if not name.startswith(UNPROMPTED)}
    if guidance == 1:
        return model.velocity(latents, sigma, told)
    instead = {
        name.removeprefix(UNPROMPTED): column for name, column in encoding.items() if name.startswith(UNPROMPTED)
    }
    both = {name: torch.cat([column, instead.get(name, column)]) for name, column in told.items()}
    given, without = model.velocity(latents.repeat(2, *[1] * (latents.ndim - 1)), sigma.repeat(2), both).chunk(2)
    return without + guidance * (given - without)
