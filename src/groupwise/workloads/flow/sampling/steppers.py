"""One denoising step as a Gaussian: its mean, its standard deviation, the log-prob of a sample, the KL to a reference.

sigma runs from 1 (noise) to 0 (data); x = (1 - sigma) clean + sigma noise, velocity = noise - clean, dt = sigma_next -
sigma < 0. All in float32. Each stepper is a function of (x, velocity, interval).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

Latents = Float[Tensor, "rows *dims"]
Levels = Float[Tensor, " rows"]


@dataclass(frozen=True)
class NoiseInterval:
    """The noise levels before and after a step, for each row, and how much noise the step adds."""

    sigma: Levels
    sigma_next: Levels
    eta: float
    sigma_after_first: float
    """The schedule's second level. It replaces sigma in 1 - sigma at the first step, where sigma is 1."""

    @property
    def dt(self) -> Levels:
        return self.sigma_next - self.sigma


@dataclass(frozen=True)
class Transition:
    mean: Latents
    std: Levels
    """0 where the step is deterministic."""
    scored_by_distance: bool = False
    """Score samples by minus the squared distance to the mean instead of by the log-prob."""


_ALMOST_NOISE = 1 - 1e-4
"""Levels above it are noise: some schedules begin at 1 - 1e-6, where sigma / (1 - sigma) would be a million."""
Stepper = Callable[[Latents, Latents, NoiseInterval], Transition]


def ode(x: Latents, velocity: Latents, interval: NoiseInterval) -> Transition:
    """Euler's step: mean = x + velocity dt, std = 0."""
    return Transition(x + velocity * _broadcast(interval.dt, x), torch.zeros_like(interval.sigma))


def flow_sde(x: Latents, velocity: Latents, interval: NoiseInterval) -> Transition:
    """Flow-GRPO's SDE (Liu et al., arXiv 2505.05470): noise scale s = eta sqrt(sigma / (1 - sigma)).

    mean = x (1 + s^2 dt / (2 sigma)) + velocity (1 + s^2 (1 - sigma) / (2 sigma)) dt; std = s sqrt(-dt).
    """
    clean_share = torch.where(interval.sigma > _ALMOST_NOISE, 1 - interval.sigma_after_first, 1 - interval.sigma)
    return _sde(x, velocity, interval, interval.eta * (interval.sigma / clean_share).sqrt())


def dance_sde(x: Latents, velocity: Latents, interval: NoiseInterval) -> Transition:
    """DanceGRPO's SDE (Xue et al., arXiv 2505.07818): the noise scale is eta at every level."""
    return _sde(x, velocity, interval, torch.full_like(interval.sigma, interval.eta))


def cps(x: Latents, velocity: Latents, interval: NoiseInterval) -> Transition:
    """Coefficients-preserving sampling (Wang and Yu, arXiv 2509.05952): std = sigma_next sin(eta pi / 2).

    The noise after a step is partly the predicted noise and partly new. Even with an exact velocity the samples'
    standard deviation is below that of the data.
    """
    clean, noise = x - _broadcast(interval.sigma, x) * velocity, x + _broadcast(1 - interval.sigma, x) * velocity
    kept_noise = interval.sigma_next * math.cos(interval.eta * math.pi / 2)
    mean = _broadcast(1 - interval.sigma_next, x) * clean + _broadcast(kept_noise, x) * noise
    return Transition(mean, interval.sigma_next * math.sin(interval.eta * math.pi / 2))


def cps_distance(x: Latents, velocity: Latents, interval: NoiseInterval) -> Transition:
    """cps with the score of its authors' code: -|sample - mean|^2, without std and constants.

    Relative to the log-prob a step counts 2 std^2 times as much, so the clip ranges of the two differ, too.
    """
    return replace(cps(x, velocity, interval), scored_by_distance=True)


STEPPERS: dict[str, Stepper] = {
    "flow_sde": flow_sde,
    "dance_sde": dance_sde,
    "cps": cps,
    "cps_distance": cps_distance,
    "ode": ode,
}


def _sde(x: Latents, velocity: Latents, interval: NoiseInterval, noise_scale: Levels) -> Transition:
    """One Euler-Maruyama step of the reverse-time SDE that has the same marginals as the ODE."""
    drift_scale = noise_scale**2 / (2 * interval.sigma)
    of_x = 1 + drift_scale * interval.dt
    of_velocity = (1 + drift_scale * (1 - interval.sigma)) * interval.dt
    mean = x * _broadcast(of_x, x) + velocity * _broadcast(of_velocity, x)
    return Transition(mean, noise_scale * (-interval.dt).sqrt())


def sample_transition(transition: Transition, noise: Latents) -> Latents:
    return transition.mean + _broadcast(transition.std, noise) * noise


def transition_logprob(following: Latents, transition: Transition) -> Levels:
    """Log-prob of the following latents, averaged over their elements: hence clip ranges of 1e-3 and less."""
    std, distance = _broadcast(transition.std, following), (following.detach() - transition.mean) ** 2
    if transition.scored_by_distance:
        return -distance.flatten(1).mean(1)
    density = -distance / (2 * std**2) - std.log() - math.log(2 * math.pi) / 2
    return density.flatten(1).mean(1)


def transition_kl(transition: Transition, reference: Transition) -> Levels:
    """KL to the reference's step, |mean - reference mean|^2 / (2 std^2), averaged over elements. std includes dt."""
    gap = (transition.mean - reference.mean.detach()) ** 2
    return (gap / (2 * _broadcast(transition.std, gap) ** 2)).flatten(1).mean(1)


def _broadcast(levels: Levels, like: Tensor) -> Tensor:
    return levels.view(-1, *[1] * (like.ndim - 1))
