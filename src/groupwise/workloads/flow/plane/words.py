"""Prompts of the embedded task: the light in which the plane is to be shown. Words are encoded one-hot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.core.errors import UserError

LIGHT = {"by day": 1.0, "at dusk": 0.7, "by night": 0.45}
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
    if prompt and prompt not in LIGHT:
        raise UserError(f"The prompt is '{prompt}': the embedded model knows {', '.join(LIGHT)}.")


def brightness(prompts: Sequence[str]) -> Float[Tensor, " prompts"]:
    return torch.tensor([LIGHT[prompt] for prompt in prompts])
