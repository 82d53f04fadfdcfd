"""A textured plane at distance 1 and what a pinhole camera sees of it, in closed form.

A texture is a sum of two waves in each of three colours. What a camera at a pose sees at a pixel is the texture where
the pixel's ray meets the plane; nothing is sampled or interpolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.core.randomness import uniform
from groupwise.workloads.flow.cameras import poses_of, split

FRAMES, SIDE, COLOURS, WAVES = 5, 12, 3, 2
LARGEST_TURN, LARGEST_MOVE = 0.3, 0.35
"""Radians about each axis, and distances along each, at the far end of a path."""
_NEAREST = 0.2  # a ray that hardly meets the plane is cut off here; no path of the task comes near it
_SCENE, _PATH, _OWN_PATH = 1, 2, 3


@dataclass(frozen=True)
class Scenes:
    """Waves: amplitude x sin(2 pi (frequency . place) + phase)."""

    frequency: Float[Tensor, "scenes colours waves 2"]
    phase: Float[Tensor, "scenes colours waves"]
    amplitude: Float[Tensor, "scenes colours waves"]

    def __len__(self) -> int:
        return len(self.phase)

    def at(self, rows: Int64[Tensor, " rows"]) -> Scenes:
        return Scenes(self.frequency[rows], self.phase[rows], self.amplitude[rows])

    @staticmethod
    def stacked(single: Sequence[Scenes]) -> Scenes:
        """Many of one scene each as one of many."""
        return Scenes(
            torch.cat([each.frequency for each in single]),
            torch.cat([each.phase for each in single]),
            torch.cat([each.amplitude for each in single]),
        )

    def paint(self, places: Float[Tensor, "scenes points 2"]) -> Float[Tensor, "scenes points colours"]:
        """The texture at places of the plane."""
        turns = torch.einsum("spk,scwk->spcw", places, self.frequency)
        return (self.amplitude[:, None] * torch.sin(2 * torch.pi * turns + self.phase[:, None])).sum(-1)

    def slope(self, places: Float[Tensor, "scenes points 2"]) -> Float[Tensor, "scenes points colours 2"]:
        """How the texture changes with the place."""
        turns = torch.einsum("spk,scwk->spcw", places, self.frequency)
        wave = self.amplitude[:, None] * torch.cos(2 * torch.pi * turns + self.phase[:, None])
        return 2 * torch.pi * torch.einsum("spcw,scwk->spck", wave, self.frequency)


def draw_scenes(seed: int, numbers: Int64[Tensor, " scenes"]) -> Scenes:
    """The scenes of these numbers; any of them can be asked for directly."""
    chance = uniform(seed, _SCENE, numbers[:, None], 0, 0, torch.arange(COLOURS * WAVES * 4)).float()
    turn, length, phase, strength = chance.view(-1, COLOURS, WAVES, 4).unbind(-1)
    angle, cycles = torch.pi * turn, 0.3 + 0.35 * length
    frequency = torch.stack([cycles * angle.cos(), cycles * angle.sin()], dim=-1)
    return Scenes(frequency, 2 * torch.pi * phase, 0.3 + 0.25 * strength)


def draw_motions(seed: int, numbers: Int64[Tensor, " paths"], *, own: bool = False) -> Float[Tensor, "paths frames 6"]:
    """Smooth ways from the first pose to a far end: straight, or bending towards a second direction.

    `own` draws those of the source clips, which are half as long.
    """
    kind = _OWN_PATH if own else _PATH
    chance = 2 * uniform(seed, kind, numbers[:, None], 0, 0, torch.arange(12)).float() - 1
    limits = torch.tensor([LARGEST_TURN] * 3 + [LARGEST_MOVE] * 3) * (0.5 if own else 1.0)
    end, bend = chance[:, :6] * limits, chance[:, 6:] * limits / 2
    progress = torch.linspace(0, 1, FRAMES)[None, :, None]
    return end[:, None] * progress + bend[:, None] * 2 * progress * (1 - progress)


def rays() -> Float[Tensor, "points 3"]:
    """Through the middles of the pixels, row by row; the picture spans 90 degrees."""
    across = (torch.arange(SIDE) + 0.5) * 2 / SIDE - 1
    down, right = torch.meshgrid(across, across, indexing="ij")
    return torch.stack([right.flatten(), down.flatten(), torch.ones(SIDE * SIDE)], dim=-1)


def meet(camera: Float[Tensor, "cameras 12"]) -> Float[Tensor, "cameras points 2"]:
    """Where on the plane each pixel looks."""
    rotation, origin = split(camera)
    direction = torch.einsum("nij,pj->npi", rotation, rays().to(camera))
    distance = (1 - origin[:, None, 2:]) / direction[..., 2:].clamp(min=_NEAREST)
    return origin[:, None, :2] + distance * direction[..., :2]


def film(scenes: Scenes, camera: Float[Tensor, "clips frames 12"]) -> Float[Tensor, "clips colours frames side side"]:
    """The clip that a camera on its path takes of each scene, in -1..1 or a little beyond."""
    clips, frames = camera.shape[:2]
    places = meet(camera.flatten(0, 1)).reshape(clips, -1, 2)
    return scenes.paint(places).view(clips, frames, SIDE, SIDE, COLOURS).permute(0, 4, 1, 2, 3)


def path_of(motions: Float[Tensor, "paths frames 6"]) -> Float[Tensor, "paths frames 12"]:
    return poses_of(motions)
