"""Shares with their uncertainty, and the share of a gap that is closed."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor

_NORMAL_95 = 1.959964


def wilson(hits: int, trials: int, z: float = _NORMAL_95) -> tuple[float, float]:
    """The 95 % confidence interval of a share (Wilson, 1927): sensible also at 0 of n, where others have no width."""
    if not trials:
        return 0.0, 1.0
    share, square = hits / trials, z * z / trials
    centre = (share + square / 2) / (1 + square)
    reach = z * sqrt(share * (1 - share) / trials + square / (4 * trials)) / (1 + square)
    return max(0.0, centre - reach), min(1.0, centre + reach)


def gap_closed(floor: float, reached: float, ceiling: float) -> float | None:
    """How much of the way from the floor to the ceiling was made; None where there is no way to go."""
    return (reached - floor) / (ceiling - floor) if ceiling > floor else None


def gap_interval(
    floor: Float[Tensor, " questions"],
    reached: Float[Tensor, " questions"],
    ceiling: Float[Tensor, " questions"],
    images: Sequence[str],
    *,
    draws: int = 2000,
) -> tuple[float, float] | None:
    """The 95 % bootstrap interval of the gap closed. Images are drawn, not questions: those about one go together."""
    number = {image: nth for nth, image in enumerate(dict.fromkeys(images))}
    owner = torch.tensor([number[image] for image in images])
    columns = torch.stack([floor, reached, ceiling], dim=1).double()
    sums = torch.zeros(len(number), 3, dtype=torch.float64).index_add_(0, owner, columns)
    source = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(number), (draws, len(number)), generator=source)
    low, got, high = sums[drawn].sum(1).unbind(1)
    gaps = ((got - low) / (high - low))[high > low]
    if len(gaps) < draws / 2:
        return None
    bounds = gaps.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return bounds[0], bounds[1]


def is_noise(interval: Sequence[float] | None) -> bool:
    """Whether the interval is so wide that the share says nothing: the gap is smaller than its noise."""
    return interval is None or interval[1] - interval[0] > 1
