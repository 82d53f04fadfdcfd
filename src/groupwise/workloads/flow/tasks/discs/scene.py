"""Prompts such as "two red discs left", images that obey them, and the fixed decoder from latents to pixels.

A latent channel belongs to a color: how far a pixel is inside a disc of that color, below 0 outside, from -1 to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from groupwise.core.errors import UserError
from groupwise.core.randomness import uniform
from groupwise.workloads.flow.tasks.discs.config import LATENT_SIDE, PROMPT_WORDS, SIDE

COUNTS = ("one", "two", "three")
COLORS = ("red", "green", "blue")
PLACES = ("left", "right", "top", "bottom")
NOUNS = ("disc", "discs", "discs")
"""By count."""
WORDS = (*COUNTS, *COLORS, *PLACES, "disc", "discs")
RADIUS = 0.24
"""Of a disc, in an image from -1 to 1."""
DISC_AREA = torch.pi * RADIUS**2 / 4
"""The share of an image that a disc covers."""

PALETTE = torch.tensor([[0.9, -0.6, -0.6], [-0.6, 0.7, -0.6], [-0.5, -0.3, 0.95]])
BACKGROUND = -0.75
"""RGB of the colors in -1..1, and gray of what is behind them."""

Images = Float[Tensor, "images 3 side side"]
Latents = Float[Tensor, "images 3 latent_side latent_side"]
Meanings = Int64[Tensor, "prompts 3"]
"""Count - 1, color and place of a prompt, as numbers of the words."""

_SLOTS = ((0.0, 0.0, 0.0), (-0.4, 0.4, 0.0), (-0.66, 0.0, 0.66))
_JITTER = (0.15, 0.1, 0.03)
_ACROSS = (0.4, 0.6)
"""By count, discs stand in slots along one axis, shaken; on the other they are this far from the middle."""
_EDGE = 0.15
"""Distance from a disc's border at which a latent is 1."""
_SHARPNESS = 12.0
_LAYOUT = 1  # key of the random numbers


def all_prompts(*, held_out: bool) -> list[str]:
    """The 27 prompts to train on, or the 9 others; each word is in both, each pair of two words, too, in training."""
    numbers = product(range(3), range(3), range(4))
    return [
        f"{COUNTS[count]} {COLORS[color]} {NOUNS[count]} {PLACES[place]}"
        for count, color, place in numbers
        if ((count + color + place) % 4 == 0) == held_out
    ]


def parse_prompts(prompts: Sequence[str]) -> Meanings:
    return torch.tensor([_parse(prompt) for prompt in prompts])


def _parse(prompt: str) -> tuple[int, int, int]:
    words = dict(enumerate(prompt.split()))
    try:
        meaning = COUNTS.index(words[0]), COLORS.index(words[1]), PLACES.index(words[3])
        if len(words) == PROMPT_WORDS and words[2] == NOUNS[meaning[0]]:
            return meaning
    except (KeyError, ValueError):
        pass
    raise UserError(
        f"The prompt is '{prompt}': the embedded model knows COUNT COLOR disc(s) PLACE, with {', '.join(COUNTS)};"
        f" {', '.join(COLORS)}; {', '.join(PLACES)}; such as 'two red discs left'."
    )


def encode_meanings(meanings: Meanings) -> Float[Tensor, "prompts words vocabulary"]:
    """One-hot words."""
    count, color, place = meanings.unbind(1)
    first_color, first_place, first_noun = (WORDS.index(word) for word in (COLORS[0], PLACES[0], "disc"))
    words = [count, first_color + color, first_noun + (count > 0).long(), first_place + place]
    return functional.one_hot(torch.stack(words, dim=1), len(WORDS)).float()


def draw_centers(
    seed: int, numbers: Int64[Tensor, " images"], meanings: Meanings
) -> tuple[Float[Tensor, "images 3 2"], Bool[Tensor, "images 3"]]:
    """Where discs may stand (x, y), and which of the three are there."""
    uniforms = uniform(seed, _LAYOUT, numbers[:, None], 0, 0, torch.arange(6)).float()
    count = meanings[:, 0]
    along = torch.tensor(_SLOTS)[count] + torch.tensor(_JITTER)[count, None] * (2 * uniforms[:, :3] - 1)
    away = _ACROSS[0] + (_ACROSS[1] - _ACROSS[0]) * uniforms[:, 3:]
    place = meanings[:, 2, None]
    signed = torch.where(place % 2 == 0, -away, away)
    is_sideways = place < 2
    centers = torch.stack([torch.where(is_sideways, signed, along), torch.where(is_sideways, along, signed)], dim=-1)
    return centers, torch.arange(3) <= count[:, None]


def draw_latents(seed: int, numbers: Int64[Tensor, " images"], meanings: Meanings) -> Latents:
    """Images that obey the prompts."""
    centers, taken = draw_centers(seed, numbers, meanings)
    axis = (torch.arange(LATENT_SIDE) + 0.5) * 2 / LATENT_SIDE - 1
    down, right = torch.meshgrid(axis, axis, indexing="ij")
    pixels = torch.stack([right, down], dim=-1)
    distance = RADIUS - (pixels - centers[:, :, None, None]).norm(dim=-1)
    inside = torch.where(taken[:, :, None, None], distance, -1.0).amax(1).div(_EDGE).clamp(-1, 1)
    has_color = functional.one_hot(meanings[:, 1], len(COLORS)).bool()
    return torch.where(has_color[:, :, None, None], inside[:, None], -1.0)


def decode(latents: Latents) -> Images:
    """Discs over a dark background, in -1..1."""
    large = functional.interpolate(latents, size=(SIDE, SIDE), mode="bicubic", align_corners=False)
    opacity = torch.sigmoid(_SHARPNESS * large)
    clear = (1 - opacity).prod(1, keepdim=True)
    total = opacity.sum(1, keepdim=True).clamp(min=1e-6)
    painted = torch.einsum("ncij,ck->nkij", opacity / total, PALETTE)
    return clear * BACKGROUND + (1 - clear) * painted


def color_shares(images: Images) -> Float[Tensor, "images 3 side side"]:
    """How much of each color there is at each pixel, from 0 to 1: the inverse of the painting."""
    basis = PALETTE - BACKGROUND
    return torch.einsum("nkij,kc->ncij", images - BACKGROUND, torch.linalg.inv(basis)).clamp(0, 1)
