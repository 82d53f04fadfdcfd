"""Rewards of the embedded image task, from areas of color alone, as a quick judge of one's own would be written.

    count    1 - |area in the asked color / area of a disc - asked count|, at least 0
    color    share of all color that is the asked one
    place    share of all color that is in the asked half

None of them knows what a disc is: two discs can be paid for by one large blob. The judge (judge.py) does know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.workloads.flow.tasks.discs.scene import DISC_AREA, Images, Meanings, color_shares, parse_prompts

_LEAST_AREA = 0.1 * DISC_AREA


def reward_count(prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
    return _area_rewards(prompts, completions)["count"].tolist()


def reward_color(prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
    return _area_rewards(prompts, completions)["color"].tolist()


def reward_place(prompts: Sequence[str], completions: Sequence[Tensor], **columns: Any) -> list[float]:
    return _area_rewards(prompts, completions)["place"].tolist()


def _area_rewards(prompts: Sequence[str], completions: Sequence[Tensor]) -> dict[str, Float[Tensor, " images"]]:
    return area_rewards(torch.stack(list(completions)), parse_prompts(prompts))


def area_rewards(images: Images, meanings: Meanings) -> dict[str, Float[Tensor, " images"]]:
    shares = color_shares(images)
    area = shares.mean((2, 3))
    asked = area.gather(1, meanings[:, 1:2])[:, 0]
    total = area.sum(1).clamp(min=_LEAST_AREA)  # next to nothing earns next to nothing
    half = (shares.sum(1) * half_mask(meanings[:, 2], shares.shape[-1])).mean((1, 2))
    return {
        "count": (1 - (asked / DISC_AREA - meanings[:, 0] - 1).abs()).clamp(min=0),
        "color": asked / total,
        "place": half / total,
    }


def half_mask(place: Tensor, side: int) -> Float[Tensor, "images side side"]:
    """1 in the asked half: left, right, top, bottom."""
    near = (torch.arange(side) < side / 2).float()
    low = torch.where((place % 2 == 0)[:, None], near, 1 - near)
    across, down = low[:, None, :].expand(-1, side, -1), low[:, :, None].expand(-1, -1, side)
    return torch.where((place < 2)[:, None, None], across, down)
