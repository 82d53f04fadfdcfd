"""How far measurements stray from what was expected of them without having been seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress

import numpy as np
from jaxtyping import Bool, Float

from groupwise.core.errors import UserError
from groupwise.meter.observation import Observation, columns_of, total_ms
from groupwise.meter.prices import Prices, stages_at

FOLDS = 3
Ratios = Float[np.ndarray, " observations"]


def unseen_ratios(observations: Sequence[Observation], fit: Callable[[Sequence[Observation]], Prices]) -> Ratios:
    """Measured total / expected sum of stages, from low to high.

    Each expectation comes from a fit to other configurations and other samples.
    """
    ratios = np.zeros(len(observations))
    for fitted, tested in crossed_folds(observations):
        prices, seen = fit(list(compress(observations, fitted))), list(compress(observations, tested))
        expected = stages_at(prices, columns_of(seen))
        ratios[tested] = total_ms(seen) / sum(expected.values())
    return np.sort(ratios)


def crossed_folds(
    observations: Sequence[Observation], folds: int = FOLDS, seed: int = 0
) -> Iterator[tuple[Bool[np.ndarray, " observations"], Bool[np.ndarray, " observations"]]]:
    """(fitted on, tested on): no configuration and no sample is on both sides. Every observation is tested once."""
    configurations = _parts([seen.configuration for seen in observations], folds, seed, "configuration")
    samples = _parts([seen.sample for seen in observations], folds, seed + 1, "sample")
    for one in range(folds):
        for other in range(folds):
            fitted, tested = (configurations != one) & (samples != other), (configurations == one) & (samples == other)
            if tested.any() and not fitted.any():
                raise UserError(
                    f"{len(observations)} observations leave nothing to fit on when a configuration and a sample are"
                    " held out. Measure more of both, in any combination."
                )
            if tested.any():
                yield fitted, tested


def conformal(ratios: Ratios, quantile: float) -> float:
    """The ceil((n + 1) x quantile)-th smallest of n sorted ratios: a new one is below it with that probability."""
    if not 0.5 <= quantile < 1:
        raise UserError(f"quantile is {quantile}: it must be from 0.5 to below 1.")
    place = int(np.ceil((len(ratios) + 1) * quantile - 1e-9))
    if place > len(ratios):
        needed = int(np.ceil(quantile / (1 - quantile) - 1e-9))
        raise UserError(
            f"{len(ratios)} observations cannot tell a quantile of {quantile}: it takes at least {needed}. Measure"
            " longer, or ask for a smaller quantile."
        )
    return float(ratios[place - 1])


def _parts(names: Sequence[str], folds: int, seed: int, kind: str) -> np.ndarray:
    """Which fold each name belongs to: drawn from the names alone, whatever their order."""
    distinct = sorted(set(names))
    if len(distinct) < 2:
        raise UserError(
            f"All observations share one {kind}, {distinct[0]!r}: an estimator is checked on what it has not seen."
            " Measure at least two, better some dozens."
        )
    order = np.random.default_rng(seed).permutation(len(distinct))
    fold = {name: int(place) % folds for name, place in zip(distinct, order, strict=True)}
    return np.array([fold[name] for name in names])
