"""The embedded scene: a textured plane at distance 1, camera paths over it, and prompts that set the light.

The texture is one wave in each of three colors, in directions 60 degrees apart; scenes differ in the waves' phases. A
pixel shows the texture where its ray meets the plane, in closed form: nothing is sampled or interpolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.randomness import uniform
from groupwise.workloads.flow.cameras import split_pose
from groupwise.workloads.flow.tasks.plane.config import COLORS, FRAMES, PROMPT_WORDS, SIDE

MAX_MOTION = (0.0, 0.0, 0.5, 0.4, 0.4, 0.3)
"""At the end of a path: radians about the right, down and forward axes, and distances along them.

The camera looks straight ahead: it rolls and moves, but neither pans nor tilts, because on a plane with few pixels a
small pan looks like a sideways move.
"""
_SOURCE_MOTION = 0.15  # of MAX_MOTION: the camera of a source clip is almost still
_AMPLITUDE = 0.8
_DIRECTION = torch.pi / 3 * torch.arange(COLORS)
_FREQUENCY = 0.5 * torch.stack([_DIRECTION.cos(), _DIRECTION.sin()], dim=-1)  # cycles per unit of the plane
_MIN_FORWARD = 0.2  # rays almost parallel to the plane are clamped; no path of the task comes near it
_SCENE, _PATH, _SOURCE_PATH = 1, 2, 3


@dataclass(frozen=True)
class Scenes:
    """One wave per color: 0.8 sin(2 pi (frequency . point) + phase)."""

    phase: Float[Tensor, "scenes colors"]

    def __len__(self) -> int:
        return len(self.phase)

    def select(self, rows: Int64[Tensor, " rows"]) -> Scenes:
        return Scenes(self.phase[rows])

    @staticmethod
    def concatenate(scenes: Sequence[Scenes]) -> Scenes:
        return Scenes(torch.cat([scene.phase for scene in scenes]))

    def texture(self, points: Float[Tensor, "scenes points 2"]) -> Float[Tensor, "scenes points colors"]:
        """The colors at points of the plane."""
        return _AMPLITUDE * torch.sin(self._angle(points))

    def texture_gradient(self, points: Float[Tensor, "scenes points 2"]) -> Float[Tensor, "scenes points colors 2"]:
        """The derivative of the colors with respect to the point."""
        wave = _AMPLITUDE * torch.cos(self._angle(points))
        return 2 * torch.pi * wave[..., None] * _FREQUENCY.to(points)

    def _angle(self, points: Float[Tensor, "scenes points 2"]) -> Float[Tensor, "scenes points colors"]:
        return 2 * torch.pi * points @ _FREQUENCY.to(points).T + self.phase[:, None]


def draw_scenes(seed: int, numbers: Int64[Tensor, " scenes"]) -> Scenes:
    """The scenes of these numbers, each a function of seed and number."""
    return Scenes(2 * torch.pi * uniform(seed, _SCENE, numbers[:, None], 0, 0, torch.arange(COLORS)).float())


def draw_motions(
    seed: int, numbers: Int64[Tensor, " paths"], *, of_source: bool = False
) -> Float[Tensor, "paths frames 6"]:
    """Smooth motions from the first pose to an end pose: straight, or bending towards a second direction.

    `of_source` draws those of the source clips, whose camera is almost still.
    """
    uniforms = uniform(seed, _SOURCE_PATH if of_source else _PATH, numbers[:, None], 0, 0, torch.arange(12))
    signed = 2 * uniforms.float() - 1
    limits = torch.tensor(MAX_MOTION) * (_SOURCE_MOTION if of_source else 1.0)
    end, bend = signed[:, :6] * limits, signed[:, 6:] * limits / 2
    progress = torch.linspace(0, 1, FRAMES)[None, :, None]
    return end[:, None] * progress + bend[:, None] * 2 * progress * (1 - progress)


def pixel_rays() -> Float[Tensor, "points 3"]:
    """Through the centers of the pixels, row by row; the field of view is 90 degrees."""
    centers = (torch.arange(SIDE) + 0.5) * 2 / SIDE - 1
    down, right = torch.meshgrid(centers, centers, indexing="ij")
    return torch.stack([right.flatten(), down.flatten(), torch.ones(SIDE * SIDE)], dim=-1)


def project_to_plane(camera: Float[Tensor, "cameras 12"]) -> Float[Tensor, "cameras points 2"]:
    """The point of the plane that each pixel shows."""
    rotation, origin = split_pose(camera)
    direction = torch.einsum("nij,pj->npi", rotation, pixel_rays().to(camera))
    distance = (1 - origin[:, None, 2:]) / direction[..., 2:].clamp(min=_MIN_FORWARD)
    return origin[:, None, :2] + distance * direction[..., :2]


def render_clip(
    scenes: Scenes, camera: Float[Tensor, "clips frames 12"]
) -> Float[Tensor, "clips colors frames side side"]:
    """The clip of each scene along its camera path, in -1..1."""
    clips, frames = camera.shape[:2]
    points = project_to_plane(camera.flatten(0, 1)).reshape(clips, -1, 2)
    return scenes.texture(points).view(clips, frames, SIDE, SIDE, COLORS).permute(0, 4, 1, 2, 3)


LIGHT_LEVELS = {"by day": 1.0, "at dusk": 0.7, "by night": 0.45}
"""Brightness of a clip, by its prompt."""
WORDS = ("", "by", "at", "day", "dusk", "night", "<6>", "<7>")


def encode_prompts(prompts: Sequence[str]) -> Float[Tensor, "prompts words vocabulary"]:
    """One-hot words; the empty prompt is the negative one, for guidance."""
    word_ids = torch.zeros(len(prompts), PROMPT_WORDS, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        check_prompt(prompt)
        for position, word in enumerate(prompt.split()):
            word_ids[row, position] = WORDS.index(word)
    return torch.nn.functional.one_hot(word_ids, len(WORDS)).float()


def check_prompt(prompt: str) -> None:
    if prompt and prompt not in LIGHT_LEVELS:
        raise UserError(f"The prompt is '{prompt}': the embedded model knows {', '.join(LIGHT_LEVELS)}.")


def brightness(prompts: Sequence[str]) -> Float[Tensor, "prompts 1 1 1 1"]:
    """A factor for clips [prompts, colors, frames, side, side]."""
    return torch.tensor([LIGHT_LEVELS[prompt] for prompt in prompts]).view(-1, 1, 1, 1, 1)
