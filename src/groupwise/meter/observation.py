"""What an estimator learns from: an answer's work, counted and named by stage, and the time it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from groupwise.core.errors import UserError
from groupwise.meter.latency import Measured

Features = Mapping[str, Mapping[str, float]]
"""By stage, amounts of work by name: they grow with what is executed, so more of them never takes less time."""
Columns = Mapping[str, Mapping[str, Float[np.ndarray, " rows"]]]
"""Features of many answers at once, a column for every name."""


@dataclass(frozen=True)
class Observation:
    """One measured answer."""

    configuration: str
    """Names what was executed: two settings that execute the same have the same name."""
    sample: str
    features: Features
    measured: Measured


def columns_of(observations: Sequence[Observation]) -> Columns:
    first = observations[0].features
    return {
        stage: {name: np.array([seen.features[stage][name] for seen in observations], float) for name in names}
        for stage, names in first.items()
    }


def stage_ms(observations: Sequence[Observation], stage: str) -> Float[np.ndarray, " observations"]:
    return np.array([seen.measured.stages_ms[stage] for seen in observations], float)


def total_ms(observations: Sequence[Observation]) -> Float[np.ndarray, " observations"]:
    return np.array([seen.measured.total_ms for seen in observations], float)


def check_observations(observations: Sequence[Observation]) -> None:
    """Refuse what cannot be learnt from: nothing at all, features that differ, numbers that are none."""
    if not observations:
        raise UserError("There are no observations: an estimator needs some hundred measured answers.")
    wanted = shape_of(observations[0].features)
    for seen in observations:
        where = f"The observation of {seen.configuration} on {seen.sample}"
        if shape_of(seen.features) != wanted:
            raise UserError(f"{where} has other features than the first one: name the same ones in all.")
        if set(seen.measured.stages_ms) != set(wanted):
            raise UserError(
                f"{where} was measured by {', '.join(seen.measured.stages_ms)}, but has features of"
                f" {', '.join(wanted)}: measure the stages that have features."
            )
        numbers = [*seen.measured.stages_ms.values(), *(x for part in seen.features.values() for x in part.values())]
        if not (np.isfinite(numbers).all() and min(numbers) >= 0 and 0 < seen.measured.total_ms < np.inf):
            raise UserError(f"{where} holds a number that is negative or not finite: leave failed measurements out.")


def shape_of(features: Mapping[str, Mapping[str, object]]) -> dict[str, set[str]]:
    """The names of the features, by stage."""
    return {stage: set(names) for stage, names in features.items()}
