"""A textured plane at distance 1 and what a pinhole camera sees of it, in closed form.

A texture is a wave in each of three colors, a third of a half turn apart; scenes differ in where their waves begin.
What a camera at a pose sees at a pixel is the texture where the pixel's ray meets the plane; nothing is sampled or
interpolated.
Prompts of the embedded task: the light in which the plane is to be shown. Words are encoded one-hot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.randomness import uniform
from groupwise.workloads.flow.cameras import motion_to_pose, split_pose

FRAMES, SIDE, COLOURS = 5, 8, 3
LARGEST = (0.0, 0.0, 0.5, 0.4, 0.4, 0.3)
"""At the far end of a path: radians about the axes across, down and ahead, and distances along them.

The camera looks straight ahead: it rolls and moves freely, but neither pans nor tilts, because on a plane in few pixels
a small pan looks like a move aside.
"""
_AMPLITUDE = 0.8
_DIRECTION = torch.pi / 3 * torch.arange(COLOURS)
_FREQUENCY = 0.5 * torch.stack([_DIRECTION.cos(), _DIRECTION.sin()], dim=-1)  # cycles per unit of the plane
_NEAREST = 0.2  # a ray that hardly meets the plane is cut off here; no path of the task comes near it
_SCENE, _PATH, _OWN_PATH = 1, 2, 3


@dataclass(frozen=True)
class Scenes:
    """A wave a color: 0.8 sin(2 pi (frequency . place) + phase)."""

    phase: Float[Tensor, "scenes colors"]

    def __len__(self) -> int:
        return len(self.phase)

    def at(self, rows: Int64[Tensor, " rows"]) -> Scenes:
        return Scenes(self.phase[rows])

    @staticmethod
    def stacked(single: Sequence[Scenes]) -> Scenes:
        """Many of one scene each as one of many."""
        return Scenes(torch.cat([each.phase for each in single]))

    def paint(self, places: Float[Tensor, "scenes points 2"]) -> Float[Tensor, "scenes points colors"]:
        """The texture at places of the plane."""
        return _AMPLITUDE * torch.sin(self._angle(places))

    def slope(self, places: Float[Tensor, "scenes points 2"]) -> Float[Tensor, "scenes points colors 2"]:
        """How the texture changes with the place."""
        wave = _AMPLITUDE * torch.cos(self._angle(places))
        return 2 * torch.pi * wave[..., None] * _FREQUENCY.to(places)

    def _angle(self, places: Float[Tensor, "scenes points 2"]) -> Float[Tensor, "scenes points colors"]:
        return 2 * torch.pi * places @ _FREQUENCY.to(places).T + self.phase[:, None]


def draw_scenes(seed: int, numbers: Int64[Tensor, " scenes"]) -> Scenes:
    """The scenes of these numbers; any of them can be asked for directly."""
    return Scenes(2 * torch.pi * uniform(seed, _SCENE, numbers[:, None], 0, 0, torch.arange(COLOURS)).float())


def draw_motions(seed: int, numbers: Int64[Tensor, " paths"], *, own: bool = False) -> Float[Tensor, "paths frames 6"]:
    """Smooth ways from the first pose to a far end: straight, or bending towards a second direction.

    `own` draws those of the source clips, whose camera is held almost still.
    """
    kind = _OWN_PATH if own else _PATH
    chance = 2 * uniform(seed, kind, numbers[:, None], 0, 0, torch.arange(12)).float() - 1
    limits = torch.tensor(LARGEST) * (0.15 if own else 1.0)
    end, bend = chance[:, :6] * limits, chance[:, 6:] * limits / 2
    progress = torch.linspace(0, 1, FRAMES)[None, :, None]
    return end[:, None] * progress + bend[:, None] * 2 * progress * (1 - progress)


def rays() -> Float[Tensor, "points 3"]:
    """Through the middles of the pixels, row by row; the picture spans 90 degrees."""
    across = (torch.arange(SIDE) + 0.5) * 2 / SIDE - 1
    down, right = torch.meshgrid(across, across, indexing="ij")
    return torch.stack([right.flatten(), down.flatten(), torch.ones(SIDE * SIDE)], dim=-1)


def project_to_plane(camera: Float[Tensor, "cameras 12"]) -> Float[Tensor, "cameras points 2"]:
    """Where on the plane each pixel looks."""
    rotation, origin = split_pose(camera)
    direction = torch.einsum("nij,pj->npi", rotation, rays().to(camera))
    distance = (1 - origin[:, None, 2:]) / direction[..., 2:].clamp(min=_NEAREST)
    return origin[:, None, :2] + distance * direction[..., :2]


def render_clip(
    scenes: Scenes, camera: Float[Tensor, "clips frames 12"]
) -> Float[Tensor, "clips colors frames side side"]:
    """The clip that a camera on its path takes of each scene, in -1..1 or a little beyond."""
    clips, frames = camera.shape[:2]
    places = project_to_plane(camera.flatten(0, 1)).reshape(clips, -1, 2)
    return scenes.paint(places).view(clips, frames, SIDE, SIDE, COLOURS).permute(0, 4, 1, 2, 3)


def path_of(motions: Float[Tensor, "paths frames 6"]) -> Float[Tensor, "paths frames 12"]:
    return motion_to_pose(motions)


LIGHT_LEVELS = {"by day": 1.0, "at dusk": 0.7, "by night": 0.45}
"""How bright a clip is, by its prompt."""
WORDS = ("", "by", "at", "day", "dusk", "night", "<6>", "<7>")
LENGTH = 2


def encode(prompts: Sequence[str]) -> Float[Tensor, "prompts words width"]:
    """One-hot words; the empty prompt says nothing (for guidance)."""
    numbers = torch.zeros(len(prompts), LENGTH, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        check_prompt(prompt)
        for place, word in enumerate(prompt.split()):
            numbers[row, place] = WORDS.index(word)
    return torch.nn.functional.one_hot(numbers, len(WORDS)).float()


def check_prompt(prompt: str) -> None:
    if prompt and prompt not in LIGHT_LEVELS:
        raise UserError(f"The prompt is '{prompt}': the embedded model knows {', '.join(LIGHT_LEVELS)}.")


def brightness(prompts: Sequence[str]) -> Float[Tensor, " prompts"]:
    return torch.tensor([LIGHT_LEVELS[prompt] for prompt in prompts])
