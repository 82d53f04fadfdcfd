"""One denoising step as a Gaussian: where it leads on average, and how widely it scatters.

sigma runs from 1 (noise) to 0 (data); x = (1 - sigma) clean + sigma noise, velocity = noise - clean, dt = sigma_next -
sigma < 0. All in float32. Each stepper is a function of (x, velocity, span).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Latents = Float[Tensor, "rows *dims"]
Levels = Float[Tensor, " rows"]


@dataclass(frozen=True)
class NoiseInterval:
    """From which noise level to which each row is taken, and how much noise is added on the way."""

    sigma: Levels
    sigma_next: Levels
    eta: float
    sigma_second: float
    """The schedule's second level: what stands for sigma where 1 - sigma would be 0."""

    @property
    def dt(self) -> Levels:
        return self.sigma_next - self.sigma


@dataclass(frozen=True)
class Transition:
    mean: Latents
    std: Levels
    """0 where the step is deterministic."""


Stepper = Callable[[Latents, Latents, NoiseInterval], Transition]


def ode(x: Latents, velocity: Latents, span: NoiseInterval) -> Transition:
    """Euler's step: mean = x + velocity dt, nothing is drawn."""
    return Transition(x + velocity * _broadcast(span.dt, x), torch.zeros_like(span.sigma))


def flow_sde(x: Latents, velocity: Latents, span: NoiseInterval) -> Transition:
    """Flow-GRPO's SDE (Liu et al., arXiv 2505.05470): scatter s = eta sqrt(sigma / (1 - sigma)).

    mean = x (1 + s^2 dt / (2 sigma)) + velocity (1 + s^2 (1 - sigma) / (2 sigma)) dt; std = s sqrt(-dt).
    """
    rest = torch.where(span.sigma == 1, 1 - span.sigma_second, 1 - span.sigma)
    return _sde(x, velocity, span, span.eta * (span.sigma / rest).sqrt())


def dance_sde(x: Latents, velocity: Latents, span: NoiseInterval) -> Transition:
    """DanceGRPO's SDE (Xue et al., arXiv 2505.07818): the same scatter eta at every level."""
    return _sde(x, velocity, span, torch.full_like(span.sigma, span.eta))


def cps(x: Latents, velocity: Latents, span: NoiseInterval) -> Transition:
    """Coefficients-preserving sampling (Wang and Yu, arXiv 2509.05952): std = sigma_next sin(eta pi / 2).

    The noise that a step needs is partly the estimated one and partly new; with an exact velocity the spread of the
    data comes out too small.
    """
    clean, noise = x - _broadcast(span.sigma, x) * velocity, x + _broadcast(1 - span.sigma, x) * velocity
    kept = span.sigma_next * math.cos(span.eta * math.pi / 2)
    mean = _broadcast(1 - span.sigma_next, x) * clean + _broadcast(kept, x) * noise
    return Transition(mean, span.sigma_next * math.sin(span.eta * math.pi / 2))


STEPPERS: dict[str, Stepper] = {"flow_sde": flow_sde, "dance_sde": dance_sde, "cps": cps, "ode": ode}


def _sde(x: Latents, velocity: Latents, span: NoiseInterval, scatter: Levels) -> Transition:
    """The reverse-time SDE of the same marginals, one Euler-Maruyama step."""
    pull = scatter**2 / (2 * span.sigma)
    mean = x * _broadcast(1 + pull * span.dt, x) + velocity * _broadcast((1 + pull * (1 - span.sigma)) * span.dt, x)
    return Transition(mean, scatter * (-span.dt).sqrt())


def sample_transition(transition: Transition, noise: Latents) -> Latents:
    return transition.mean + _broadcast(transition.std, noise) * noise


def transition_logprob(following: Latents, transition: Transition) -> Levels:
    """Of the following latents, a mean over all their numbers: hence clip ranges of 1e-3 and less."""
    std = _broadcast(transition.std, following)
    density = -((following.detach() - transition.mean) ** 2) / (2 * std**2) - std.log() - math.log(2 * math.pi) / 2
    return density.flatten(1).mean(1)


def transition_kl(transition: Transition, reference: Transition) -> Levels:
    """KL from the reference's step, |mean - its mean|^2 / (2 std^2), a mean over all numbers; dt is in the std."""
    gap = (transition.mean - reference.mean.detach()) ** 2
    return (gap / (2 * _broadcast(transition.std, gap) ** 2)).flatten(1).mean(1)


def residual_chi2(following: Latents, transition: Transition) -> Levels:
    """Squared standardised residual per number: near 1 where the latents were drawn from this very transition."""
    return (((following - transition.mean) / _broadcast(transition.std, following)) ** 2).flatten(1).mean(1)


def _broadcast(levels: Levels, like: Tensor) -> Tensor:
    return levels.view(-1, *[1] * (like.ndim - 1))
