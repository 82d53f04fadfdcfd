"""Rewards of the embedded image task, in two kinds with the same names.

`discs` looks for discs with a matched filter (matched_filter.py):

    count    1 - |discs found - asked count| / 2, at least 0, times the share of what is painted that is in them, times
             how well they are painted
    color    share of the discs that have the asked color; 0 without any
    place    share of the discs that are in the asked half; 0 without any

`areas` looks at areas of color alone, as a quick reward of one's own would be written:

    count    1 - |area in the asked color / area of a disc - asked count|, at least 0
    color    share of all color that is the asked one
    place    share of all color that is in the asked half

It does not know what a disc is: two discs can be paid for by one large blob. The judge (judge.py), which is asked by
neither, does know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.rewards.call import RewardFunction
from groupwise.workloads.flow.tasks.discs.config import WEIGHTS, RewardKind
from groupwise.workloads.flow.tasks.discs.matched_filter import find_discs
from groupwise.workloads.flow.tasks.discs.scene import DISC_AREA, Images, Meanings, color_shares, parse_prompts

_LEAST_AREA = 0.1 * DISC_AREA

Terms = dict[str, Float[Tensor, " images"]]


def reward_functions(kind: RewardKind) -> dict[str, RewardFunction]:
    """Of TRL's signature; images are looked at once for all of them."""
    measure = _remember_last({"discs": disc_rewards, "areas": area_rewards}[kind])
    return {name: partial(_reward, measure, name) for name in WEIGHTS}


def _reward(
    measure: Callable[[Sequence[str], Sequence[Tensor]], Terms],
    name: str,
    prompts: Sequence[str],
    completions: Sequence[Tensor],
    **columns: Any,
) -> list[float]:
    return measure(prompts, completions)[name].tolist()


def _remember_last(
    measure: Callable[[Images, Meanings], Terms],
) -> Callable[[Sequence[str], Sequence[Tensor]], Terms]:
    last: list[tuple[Sequence[str], Sequence[Tensor], Terms]] = []

    def measure_once(prompts: Sequence[str], completions: Sequence[Tensor]) -> Terms:
        if not last or last[0][0] is not prompts or last[0][1] is not completions:
            last[:] = [(prompts, completions, measure(torch.stack(list(completions)), parse_prompts(prompts)))]
        return last[0][2]

    return measure_once


def disc_rewards(images: Images, meanings: Meanings) -> Terms:
    found = find_discs(images)
    count, color, place = meanings.unbind(1)
    number = found.is_disc.sum((1, 2))
    right = (found.is_disc & (found.color == color[:, None, None])).sum((1, 2))
    there = (found.is_disc * half_mask(place, found.is_disc.shape[-1])).sum((1, 2))
    return {
        "count": (1 - (number - count - 1).abs() / 2).clamp(min=0) * found.explained * found.fit,
        "color": right / number.clamp(min=1),
        "place": there / number.clamp(min=1),
    }


def area_rewards(images: Images, meanings: Meanings) -> Terms:
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
