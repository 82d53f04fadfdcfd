"""What an estimator learns from: an answer's work, counted and named by stage, and the time it took.
Time as amounts of work, each at its price: medians, prices never negative, errors as shares of the whole.

A sum of prices holds outside of what was seen, where a tree ensemble stays flat, and never sinks when work is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from groupwise.core.errors import UserError
from groupwise.latency.records import MeasuredLatency

WorkFeatures = Mapping[str, Mapping[str, float]]
"""By stage, amounts of work by name: they grow with what is executed, so more of them never takes less time."""
Columns = Mapping[str, Mapping[str, Float[np.ndarray, " rows"]]]
"""Features of many answers at once, a column for every name."""


@dataclass(frozen=True)
class Observation:
    """One measured answer."""

    configuration: str
    """Names what was executed: two settings that execute the same have the same name."""
    sample: str
    features: WorkFeatures
    measured: MeasuredLatency


def feature_columns(observations: Sequence[Observation]) -> Columns:
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
    wanted = feature_names(observations[0].features)
    for seen in observations:
        where = f"The observation of {seen.configuration} on {seen.sample}"
        if feature_names(seen.features) != wanted:
            raise UserError(f"{where} has other features than the first one: name the same ones in all.")
        if set(seen.measured.stages_ms) != set(wanted):
            raise UserError(
                f"{where} was measured by {', '.join(seen.measured.stages_ms)}, but has features of"
                f" {', '.join(wanted)}: measure the stages that have features."
            )
        numbers = [*seen.measured.stages_ms.values(), *(x for part in seen.features.values() for x in part.values())]
        if not (np.isfinite(numbers).all() and min(numbers) >= 0 and 0 < seen.measured.total_ms < np.inf):
            raise UserError(f"{where} holds a number that is negative or not finite: leave failed measurements out.")


def feature_names(features: Mapping[str, Mapping[str, object]]) -> dict[str, set[str]]:
    """The names of the features, by stage."""
    return {stage: set(names) for stage, names in features.items()}


Coefficients = Mapping[str, Mapping[str, float]]
"""Milliseconds per unit of each feature, by stage."""
INTERCEPT = "constant"
"""What a stage costs whatever its work: every stage has this price, and nobody passes it as a feature."""
_ROUNDS = 30
_SETTLED = 1e-4
"""Prices that move less than this, as a share of the largest contribution, have been found."""
_NEGLIGIBLE = 1e-3
"""Errors below this share of the whole all weigh the same."""


def fit_coefficients(observations: Sequence[Observation]) -> Coefficients:
    """From nothing but the observations."""
    whole, prices = total_ms(observations), {}
    for stage, features in feature_columns(observations).items():
        work = np.stack([*features.values(), np.ones(len(observations))], axis=1)
        found = nonnegative_median_regression(work, stage_ms(observations, stage), whole)
        prices[stage] = dict(zip([*features, INTERCEPT], map(float, found), strict=True))
    return prices


def rescale_coefficients(prices: Coefficients, observations: Sequence[Observation]) -> Coefficients:
    """Known prices, each stage times a factor and plus a constant of its own: two numbers a stage to learn."""
    expected, whole, scaled = predict_stages(prices, feature_columns(observations)), total_ms(observations), {}
    for stage, before in prices.items():
        work = np.stack([expected[stage], np.ones(len(observations))], axis=1)
        factor, constant = map(float, nonnegative_median_regression(work, stage_ms(observations, stage), whole))
        scaled[stage] = {name: factor * price for name, price in before.items()}
        scaled[stage][INTERCEPT] += constant
    return scaled


def predict_stages(prices: Coefficients, columns: Columns) -> dict[str, Float[np.ndarray, " rows"]]:
    """What every stage of every row costs."""
    rows = max(len(column) for features in columns.values() for column in features.values())
    return {
        stage: sum(
            (part[name] * column for name, column in columns[stage].items()), start=np.full(rows, part[INTERCEPT])
        )
        for stage, part in prices.items()
    }


def nonnegative_median_regression(
    work: Float[np.ndarray, "rows features"], times: Float[np.ndarray, " rows"], scale: Float[np.ndarray, " rows"]
) -> Float[np.ndarray, " features"]:
    """Prices p >= 0 that minimise the sum of |times - work p| / scale.

    Non-negative least squares, reweighted by the inverse of the last errors until they weigh as absolute values do
    (Schlossmacher 1973): outliers, of which timings are full, pull no harder than the rest.
    """
    from sklearn.linear_model import LinearRegression

    largest = np.where(work.max(0) > 0, work.max(0), 1)
    rows, wanted = work / largest / scale[:, None], times / scale
    weights, prices = np.ones(len(rows)), np.zeros(work.shape[1])
    for _ in range(_ROUNDS):
        before = prices
        prices = LinearRegression(positive=True, fit_intercept=False).fit(rows, wanted, sample_weight=weights).coef_
        if np.abs(prices - before).max() <= _SETTLED * prices.max():
            break
        weights = 1 / np.maximum(np.abs(wanted - rows @ prices), _NEGLIGIBLE)
    return prices / largest
