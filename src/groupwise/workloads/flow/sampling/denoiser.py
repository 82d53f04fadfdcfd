"""From noise to latents: deterministic steps to the window, sampled steps in it, deterministic steps to the end.

Only the window's latents are kept, one more than it has steps. Members with shared noise have equal latents up to the
window's first step, so their velocity is computed once per group until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.core.io.progress import advance
from groupwise.core.placement import RolloutRows
from groupwise.core.randomness import normal
from groupwise.core.transfer import send
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, window_at
from groupwise.workloads.flow.sampling.steppers import (
    STEPPERS,
    NoiseInterval,
    Transition,
    ode,
    sample_transition,
    transition_logprob,
)

_INITIAL_NOISE = 0
_SHARED_NOISE = -1  # the member that a group's shared noise is keyed by


class Velocity(Protocol):
    """The policy's velocity for some rows."""

    def __call__(
        self, latents: Float[Tensor, "rows ..."], sigma: Float[Tensor, " rows"]
    ) -> Float[Tensor, "rows ..."]: ...

    def select(self, rows: Int64[Tensor, " some"]) -> Self:
        """The velocity for these rows only."""
        ...


@dataclass(frozen=True)
class SampledWindow:
    """The sampled steps of a window: enough to score them again."""

    latents: Float[Tensor, "rows latents *dims"]
    """From before the window's first step to after its last, in the stored dtype."""
    logp: Float[Tensor, "rows decisions"]


@dataclass(frozen=True)
class Denoiser:
    """The denoising steps of one training step's rollouts."""

    config: SamplingConfig
    levels: Sequence[float]
    """Noise levels from 1 to 0, one more than there are steps."""
    latent_shape: tuple[int, ...]
    device: torch.device
    window: range = range(0)

    def at_step(self, training_step: int) -> Self:
        """With the window of a training step."""
        return replace(self, window=window_at(self.config, training_step))

    def initial_noise(self, rows: RolloutRows) -> Tensor:
        """Each member's own noise, or its group's."""
        member = torch.full_like(rows.member, _SHARED_NOISE) if self.config.shared_noise else rows.member
        return self._noise(rows, member, _INITIAL_NOISE)

    def denoise_to_window(self, latents: Tensor, velocity: Velocity) -> Tensor:
        """The deterministic steps before the window."""
        return self._deterministic(latents, range(self.window.start), velocity)

    def sample_window(self, latents: Tensor, rows: RolloutRows, velocity: Velocity) -> SampledWindow:
        """Sample the window's steps. Latents are rounded to the stored dtype before they are scored or used."""
        dtype = getattr(torch, self.config.latent_dtype)
        stored, logp = [latents.to(dtype)], []
        for index, step in enumerate(self.window):
            current, shared = stored[-1].float(), self.shared_start(rows.group, index)
            transition = self.transition(current, velocity, torch.full((len(current),), step), shared=shared)
            noise = self._noise(rows, rows.member, step + 1)
            stored.append(sample_transition(transition, noise).to(dtype))
            logp.append(transition_logprob(stored[-1].float(), transition))
            advance()
        return SampledWindow(torch.stack(stored, dim=1), torch.stack(logp, dim=1))

    def denoise_from_window(self, latents: Tensor, velocity: Velocity) -> Tensor:
        """The deterministic steps after the window."""
        return self._deterministic(latents, range(self.window.stop, len(self.levels) - 1), velocity)

    def shared_start(self, group: Int64[Tensor, " rows"], index: int) -> Int64[Tensor, " rows"] | None:
        """The groups whose rows have equal latents before step `index` of the window; None where none have."""
        return group if self.config.shared_noise and index == 0 else None

    def transition(
        self, latents: Tensor, velocity: Velocity, steps: Tensor, *, shared: Int64[Tensor, " rows"] | None = None
    ) -> Transition:
        """A sampled step of each row, under the current policy.

        Rows with the same number in `shared` have equal latents: the policy runs once for all of them.
        """
        if shared is not None:
            first_rows, index = first_row_of_each(shared)
            own_rows, own_index = send(first_rows, latents.device), send(index, latents.device)
            once = self.transition(latents[own_rows], velocity.select(own_rows), steps[first_rows])
            return replace(once, mean=once.mean[own_index], std=once.std[own_index])
        levels = torch.tensor(self.levels)
        sigma, sigma_next = (send(levels[at].to(latents.dtype), latents.device) for at in (steps, steps + 1))
        interval = NoiseInterval(sigma, sigma_next, self.config.eta, float(levels[1]))
        return STEPPERS[self.config.stepper](latents, velocity(latents, sigma), interval)

    def predict_clean(self, latents: Tensor, velocity: Velocity, steps: Tensor) -> Tensor:
        """The clean latents that the policy predicts before these steps: x - sigma velocity."""
        sigma = send(torch.tensor(self.levels)[steps].to(latents.dtype), latents.device)
        return latents - sigma.view(-1, *[1] * (latents.ndim - 1)) * velocity(latents, sigma)

    def _deterministic(self, latents: Tensor, steps: range, velocity: Velocity) -> Tensor:
        for step in steps:
            sigma, sigma_next = (
                torch.full((len(latents),), level, device=latents.device).to(latents.dtype)
                for level in self.levels[step : step + 2]
            )
            latents = ode(latents, velocity(latents, sigma), NoiseInterval(sigma, sigma_next, 0.0, 0.0)).mean
            advance()
        return latents

    def _noise(self, rows: RolloutRows, member: Tensor, decision: int) -> Tensor:
        elements = torch.arange(torch.Size(self.latent_shape).numel())
        keys = (rows.seed, rows.step, rows.group[:, None], member[:, None])
        noise = normal(*keys, decision, elements).view(len(rows), *self.latent_shape).float()
        return send(noise, self.device)


def first_row_of_each(numbers: Int64[Tensor, " rows"]) -> tuple[Int64[Tensor, " distinct"], Int64[Tensor, " rows"]]:
    """The first row of each distinct number, and for every row the index of its number among them."""
    distinct, index = torch.unique(numbers, return_inverse=True)
    first_rows = torch.full_like(distinct, len(numbers))
    return first_rows.scatter_reduce(0, index, torch.arange(len(numbers)), "amin"), index
