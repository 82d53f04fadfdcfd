"""The embedded scene: a disc, a square and a triangle on a chequered floor, camera paths over it, prompts for light.

The floor is a plane at distance 1. What a pixel shows is a function of the point where its ray meets the plane.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.randomness import uniform
from groupwise.workloads.flow.data.cameras import split_pose
from groupwise.workloads.flow.tasks.sprites.config import FRAMES, PROMPT_WORDS

SPRITES = ("disc", "square", "triangle")
Centers = Float[Tensor, "scenes 3 2"]
"""Where a scene's disc, square and triangle are on the plane: all that scenes differ in."""

_RADIUS = 0.3
"""Of the disc. The square and the triangle have about its area."""
_SQUARE, _TRIANGLE = 0.88 * _RADIUS, 0.62 * _RADIUS
"""From the center to the sides."""
_RING = (0.45, 0.6)
"""The sprites' distances from the middle of the scene."""
_JITTER = 0.2
"""Radians by which a sprite may be off its third of the circle."""
_TILE_PERIOD = 1.2
_PAN = (0.25, 0.5)
_MAX_ROLL, _MAX_DOLLY = 0.5, 0.25
"""At the end of a path: distance across, radians about the forward axis, distance along it."""
_MIN_FORWARD = 0.2  # rays almost parallel to the plane are clamped; no path of the task comes near it
_SCENE, _PATH = 1, 2


def draw_scenes(seed: int, numbers: Int64[Tensor, " scenes"]) -> Centers:
    """The scenes of these numbers: sprites around the middle, far enough apart not to touch."""
    uniforms = uniform(seed, _SCENE, numbers[:, None], 0, 0, torch.arange(8)).float()
    thirds = torch.arange(3) * 2 * torch.pi / 3
    direction = torch.where(uniforms[:, :1] < 0.5, -1.0, 1.0)
    angle = direction * thirds + 2 * torch.pi * uniforms[:, 1:2] + _JITTER * (2 * uniforms[:, 2:5] - 1)
    radius = _RING[0] + (_RING[1] - _RING[0]) * uniforms[:, 5:8]
    return radius[..., None] * torch.stack([angle.cos(), angle.sin()], dim=-1)


def draw_motions(seed: int, numbers: Int64[Tensor, " paths"]) -> Float[Tensor, "paths frames 6"]:
    """Smooth motions from the first pose to an end pose, bent by up to a third of the largest motion.

    The camera rolls and moves, but neither pans nor tilts about its own axes: from few pixels a small turn cannot be
    told from a sideways move.
    """
    uniforms = uniform(seed, _PATH, numbers[:, None], 0, 0, torch.arange(8)).float()
    signed, zero = 2 * uniforms - 1, torch.zeros(len(numbers))
    angle, distance = torch.pi * signed[:, 0], _PAN[0] + (_PAN[1] - _PAN[0]) * uniforms[:, 1]
    roll, dolly = _MAX_ROLL * signed[:, 2], _MAX_DOLLY * signed[:, 3]
    end = torch.stack([zero, zero, roll, distance * angle.cos(), distance * angle.sin(), dolly], dim=-1)
    limits = torch.tensor([_MAX_ROLL, _PAN[1], _PAN[1], _MAX_DOLLY]) / 3
    bend = torch.cat([torch.zeros(len(numbers), 2), signed[:, 4:] * limits], dim=-1)
    progress = torch.linspace(0, 1, FRAMES)[None, :, None]
    return end[:, None] * progress + bend[:, None] * 2 * progress * (1 - progress)


def pixel_rays(side: int) -> Float[Tensor, "points 3"]:
    """Through the centers of the pixels, row by row; the field of view is 90 degrees."""
    centers = (torch.arange(side) + 0.5) * 2 / side - 1
    down, right = torch.meshgrid(centers, centers, indexing="ij")
    return torch.stack([right.flatten(), down.flatten(), torch.ones(side * side)], dim=-1)


def project_to_plane(camera: Float[Tensor, "*cameras 12"], side: int) -> Float[Tensor, "*cameras points 2"]:
    """The point of the plane that each pixel shows."""
    rotation, origin = split_pose(camera)
    direction = torch.einsum("...ij,pj->...pi", rotation, pixel_rays(side).to(camera))
    distance = (1 - origin[..., None, 2:]) / direction[..., 2:].clamp(min=_MIN_FORWARD)
    return origin[..., None, :2] + distance * direction[..., :2]


def sprite_distances(
    centers: Centers, points: Float[Tensor, "scenes frames points 2"]
) -> Float[Tensor, "scenes 3 frames points"]:
    """How far points of the plane are inside each sprite, below 0 outside, along the normal of the nearest side."""
    x, y = (points[:, None] - centers[:, :, None, None]).unbind(-1)
    disc = _RADIUS - torch.hypot(x[:, 0], y[:, 0])
    square = _SQUARE - torch.maximum(x[:, 1].abs(), y[:, 1].abs())
    slope, half = 0.75**0.5 * x[:, 2], -0.5 * y[:, 2]
    triangle = _TRIANGLE - torch.maximum(y[:, 2], torch.maximum(half + slope, half - slope))
    return torch.stack([disc, square, triangle], dim=1)


def floor_pattern(points: Float[Tensor, "*batch 2"]) -> Float[Tensor, "*batch"]:
    """Above 0 on one color of the tiles and below 0 on the other."""
    return torch.sin(2 * torch.pi / _TILE_PERIOD * points).prod(-1)


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


def light_levels(prompts: Sequence[str]) -> Float[Tensor, " prompts"]:
    return torch.tensor([LIGHT_LEVELS[prompt] for prompt in prompts])
