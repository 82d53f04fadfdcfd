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

from groupwise.core.transfer import send
from groupwise.workloads.flow.sampling.encoding_store import EncodingStore
from groupwise.workloads.flow.task import Condition, ConditionSpec

Conditioning = Mapping[str, Tensor]
"""The transformer's inputs besides latents and noise level, by name: of one condition, or of many rows."""
NEGATIVE_PREFIX = "negative_"
"""An input with this prefix replaces the one without it in the pass for the negative prompt."""


def guided(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance (Ho and Salimans, arXiv 2207.12598): negative + scale (positive - negative)."""
    return negative + scale * (positive - negative)


class FlowModel(Protocol):
    """Inherit from it: the methods below with a body are defaults."""

    policy: nn.Module
    """The transformer, or the transformers for different noise levels."""
    condition_spec: ConditionSpec
    guides_in_one_pass: bool = True
    """Prompt and negative prompt go through the model as one batch; False for one after the other, which takes less
    memory and is what most pipelines do."""

    encoding_store: EncodingStore | None = None
    """Where encodings are kept on the disk; models that are quick to encode ignore it."""

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

    def noise_levels(self, steps: int) -> Sequence[float] | None:
        """The model's own schedule, one more level than steps, the last one 0; None where it has none."""
        return None

    def guide(self, positive: Tensor, negative: Tensor, sigma: Float[Tensor, " rows"], scale: float) -> Tensor:
        """The velocity from those for the prompt and for the negative prompt."""
        return guided(positive, negative, scale)

    def idle_parts(self, sigmas: Sequence[float]) -> Sequence[str]:
        """Children of the policy that no step at these noise levels uses, by name."""
        return ()


@dataclass(frozen=True)
class GuidedVelocity:
    """The policy's velocity under classifier-free guidance; at guidance_scale 1 only the positive one is computed."""

    model: FlowModel
    conditioning: Conditioning
    """Of each row, for the prompt and for the negative prompt."""
    guidance_scale: float = 1.0

    def __call__(self, latents: Float[Tensor, "rows ..."], sigma: Float[Tensor, " rows"]) -> Float[Tensor, "rows ..."]:
        if self.guidance_scale == 1:
            return self.model.velocity(latents, sigma, self._positive_inputs)
        if self.model.guides_in_one_pass:
            twice = latents.repeat(2, *[1] * (latents.ndim - 1))
            positive, negative = self.model.velocity(twice, sigma.repeat(2), self._joined_inputs).chunk(2)
        else:
            positive = self.model.velocity(latents, sigma, self._positive_inputs)
            negative = self.model.velocity(latents, sigma, self._negative_inputs)
        return self.model.guide(positive, negative, sigma, self.guidance_scale)

    def select(self, rows: Int64[Tensor, " some"]) -> GuidedVelocity:
        """The velocity for these rows only, in this order."""
        rows_on = {column.device: send(rows, column.device) for column in self.conditioning.values()}
        columns = {name: column[rows_on[column.device]] for name, column in self.conditioning.items()}
        return replace(self, conditioning=columns)

    @cached_property
    def _positive_inputs(self) -> Conditioning:
        return {name: column for name, column in self.conditioning.items() if not name.startswith(NEGATIVE_PREFIX)}

    @cached_property
    def _negative_inputs(self) -> Conditioning:
        return {
            name: self.conditioning.get(f"{NEGATIVE_PREFIX}{name}", column)
            for name, column in self._positive_inputs.items()
        }

    @cached_property
    def _joined_inputs(self) -> Conditioning:
        """The same in every step, so they are concatenated once."""
        return {
            name: torch.cat([column, self._negative_inputs[name]]) for name, column in self._positive_inputs.items()
        }
