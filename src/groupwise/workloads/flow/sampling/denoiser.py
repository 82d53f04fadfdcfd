"""From noise to latents: deterministic steps shared by a group, drawn steps in the window, deterministic ones after it.

Only the window's latents are kept: one more than it has steps, each once. Members that branch from one start stand at
the same place before the window's first step, so there too their velocity is computed once per group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.core.placement import RolloutRows
from groupwise.core.randomness import normal
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, noise_levels, pairs, window_at
from groupwise.workloads.flow.sampling.steppers import (
    STEPPERS,
    NoiseInterval,
    Transition,
    ode,
    sample_transition,
    transition_logprob,
)

_FIRST_NOISE = 0
_SHARED_NOISE = -1  # the member that a group's shared noise belongs to


class Velocity(Protocol):
    """The policy's velocity of some rows."""

    def __call__(
        self, latents: Float[Tensor, "rows ..."], sigma: Float[Tensor, " rows"]
    ) -> Float[Tensor, "rows ..."]: ...

    def of(self, rows: Int64[Tensor, " some"]) -> Self:
        """The same of these rows alone."""
        ...


@dataclass(frozen=True)
class SampledWindow:
    """What a window drew: enough to score it again."""

    path: Float[Tensor, "rows latents *dims"]
    """The window's latents, from before its first step to after its last, in the storage dtype."""
    logp: Float[Tensor, "rows decisions"]


@dataclass(frozen=True)
class Denoiser:
    """The steps of one training step's rollouts."""

    config: SamplingConfig
    shape: tuple[int, ...]
    window: range
    device: torch.device

    @staticmethod
    def at(config: SamplingConfig, step: int, shape: tuple[int, ...], device: torch.device) -> Denoiser:
        return Denoiser(config, shape, window_at(config, step), device)

    def first_noise(self, rows: RolloutRows) -> Float[Tensor, "rows ..."]:
        """Keyed by the group alone where members branch from one start, and by the member otherwise."""
        member = torch.full_like(rows.member, _SHARED_NOISE) if self.config.branch else rows.member
        return self._noise(rows, member, _FIRST_NOISE)

    def before(self, latents: Tensor, velocity: Velocity) -> Tensor:
        """The deterministic steps up to the window."""
        return self._deterministic(latents, range(self.window.start), velocity)

    def within(self, latents: Tensor, rows: RolloutRows, velocity: Velocity) -> SampledWindow:
        """Draw the window's steps. Latents are rounded as they will be stored before they are scored or used."""
        storage = getattr(torch, self.config.storage)
        path, logp = [latents.to(storage)], []
        for nth in self.window:
            now, alike = path[-1].float(), self.alike(rows.group, nth - self.window.start)
            transition = self.transition(now, velocity, torch.full((len(now),), nth), alike=alike)
            noise = self._noise(rows, rows.member, nth + 1)
            path.append(sample_transition(transition, noise).to(storage))
            logp.append(transition_logprob(path[-1].float(), transition))
        return SampledWindow(torch.stack(path, dim=1), torch.stack(logp, dim=1))

    def after(self, latents: Tensor, velocity: Velocity) -> Tensor:
        """The deterministic steps behind the window."""
        return self._deterministic(latents, range(self.window.stop, self.config.steps), velocity)

    def alike(self, group: Int64[Tensor, " rows"], nth: int) -> Int64[Tensor, " rows"] | None:
        """Which rows still stand at one place before the window's nth step, by number; None where each has its own."""
        return group if self.config.branch and nth == 0 else None

    def transition(
        self, latents: Tensor, velocity: Velocity, steps: Tensor, *, alike: Int64[Tensor, " rows"] | None = None
    ) -> Transition:
        """Where a drawn step of each row leads, under the present policy.

        Rows that have a number in `alike` in common have the same latents: the policy is asked once for all of them.
        """
        if alike is not None:
            first, line = first_row_of_each(alike)
            once = self.transition(latents[first], velocity.of(first), steps[first])
            return Transition(once.mean[line], once.std[line])
        levels = torch.tensor(noise_levels(self.config))
        sigma, sigma_next = levels[steps].to(latents), levels[steps + 1].to(latents)
        span = NoiseInterval(sigma, sigma_next, self.config.eta, float(levels[1]))
        return STEPPERS[self.config.stepper](latents, velocity(latents, sigma), span)

    def expected(self, latents: Tensor, velocity: Velocity, steps: Tensor) -> Tensor:
        """The clean latents that the policy expects to arrive at from before these steps: x - sigma velocity."""
        sigma = torch.tensor(noise_levels(self.config))[steps].to(latents)
        return latents - sigma.view(-1, *[1] * (latents.ndim - 1)) * velocity(latents, sigma)

    def _deterministic(self, latents: Tensor, steps: range, velocity: Velocity) -> Tensor:
        for sigma, sigma_next in pairs(noise_levels(self.config), steps):
            now, following = (torch.full((len(latents),), level).to(latents) for level in (sigma, sigma_next))
            latents = ode(latents, velocity(latents, now), NoiseInterval(now, following, 0.0, 0.0)).mean
        return latents

    def _noise(self, rows: RolloutRows, member: Tensor, decision: int) -> Tensor:
        elements = torch.arange(torch.Size(self.shape).numel())
        keys = (rows.seed, rows.step, rows.group[:, None], member[:, None])
        return normal(*keys, decision, elements).view(len(rows), *self.shape).float().to(self.device)


def first_row_of_each(numbers: Int64[Tensor, " rows"]) -> tuple[Int64[Tensor, " different"], Int64[Tensor, " rows"]]:
    """The first row of each number, and which of them stands for each row."""
    different, line = torch.unique(numbers, return_inverse=True)
    first = torch.full_like(different, len(numbers))
    return first.scatter_reduce(0, line, torch.arange(len(numbers)), "amin"), line
