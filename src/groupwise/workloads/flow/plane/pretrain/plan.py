"""What a pretraining run depends on, and the clips of each of its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.randomness import normal, uniform
from groupwise.workloads.flow.plane.scene import (
    FRAMES,
    LARGEST,
    draw_motions,
    draw_scenes,
    film,
    path_of,
)
from groupwise.workloads.flow.plane.words import LIGHT, brightness, encode

_DRAWS = 7  # keys of random numbers that are a step's own


@dataclass(frozen=True)
class Plan:
    seed: int = 20
    steps: int = 900
    rows: int = 32
    width: int = 64
    heads: int = 2
    blocks: int = 3
    hidden: int = 192
    learning_rate: float = 2e-3
    warmup: int = 50
    cosine: int = 4000
    """Steps over which the learning rate would fall to zero by itself."""
    decay: int = 400
    """Last steps, over which it falls to zero indeed."""
    drift: float = 0.2
    """Poses given with the clips are wrong, as those estimated from real videos are: by this share of the largest
    motion (std), growing along the path. So the model knows where about the camera goes, not exactly where."""
    prompt_dropped: float = 0.1
    """Share of clips without a prompt, for guidance."""

    def rate(self, step: int) -> float:
        """Warm-up, the beginning of a cosine, then straight to zero."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        slow = (1 + math.cos(math.pi * (step - self.warmup) / (self.cosine - self.warmup))) / 2
        return self.learning_rate * slow * min(1.0, (self.steps - step) / self.decay)


@dataclass(frozen=True)
class Batch:
    clip: Float[Tensor, "rows colours frames side side"]
    source: Float[Tensor, "rows colours frames side side"]
    camera: Float[Tensor, "rows frames 12"]
    """As given with the clip: not quite where it was taken from."""
    text: Float[Tensor, "rows words width"]
    sigma: Float[Tensor, " rows"]
    noise: Float[Tensor, "rows colours frames side side"]


def draw_batch(plan: Plan, step: int) -> Batch:
    """The clips of a step, a function of the plan and the step alone."""
    numbers = step * plan.rows + torch.arange(plan.rows)
    scenes, motions = draw_scenes(plan.seed, numbers), draw_motions(plan.seed, numbers)
    drift = (
        plan.drift * torch.tensor(LARGEST) * normal(plan.seed, _DRAWS, numbers[:, None], 0, 0, torch.arange(6)).float()
    )
    label = motions + drift[:, None] * torch.linspace(0, 1, FRAMES)[None, :, None]
    chance = uniform(plan.seed, _DRAWS, numbers[:, None], 0, 1, torch.arange(3)).float()
    lights = list(LIGHT)
    prompts = [lights[int(len(lights) * number)] for number in chance[:, 0].tolist()]
    silent = chance[:, 1] < plan.prompt_dropped
    told = ["" if quiet else prompt for prompt, quiet in zip(prompts, silent.tolist(), strict=True)]
    clip = film(scenes, path_of(motions)) * brightness(prompts).view(-1, 1, 1, 1, 1)
    elements = torch.arange(clip[0].numel())
    noise = normal(plan.seed, _DRAWS, numbers[:, None], 0, 2, elements).float().view_as(clip)
    source = film(scenes, path_of(draw_motions(plan.seed, numbers, own=True)))
    sigma = chance[:, 2].sqrt()  # more of the high levels, where the clip has to be made up from what is known
    return Batch(clip, source, path_of(label), encode(told), sigma, noise)
