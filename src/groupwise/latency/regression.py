"""Latency as a sum of amounts of work times coefficients: observations, features, median regression per stage.

A linear model with non-negative coefficients extrapolates beyond the observations, where a tree ensemble stays flat,
and never estimates less time for more work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from groupwise.core.errors import UserError
from groupwise.latency.records import MeasuredLatency

WorkFeatures = Mapping[str, Mapping[str, float]]
"""Amounts of work by stage and name. They grow with what is executed, so more of them never takes less time."""
Columns = Mapping[str, Mapping[str, Float[np.ndarray, " rows"]]]
"""Features of many answers, one column per stage and name."""
Coefficients = Mapping[str, Mapping[str, float]]
"""Milliseconds per unit of each feature, by stage and name."""
INTERCEPT = "intercept"
"""Coefficient of every stage that does not depend on the work; never passed as a feature."""
_MAX_ITERATIONS = 30
_TOLERANCE = 1e-4
"""Converged when no coefficient changes by more than this share of the largest one (both scaled)."""
_MIN_ERROR = 1e-3
"""Relative errors below this all get the same weight."""


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
        stage: {name: np.array([row.features[stage][name] for row in observations], float) for name in names}
        for stage, names in first.items()
    }


def stage_ms(observations: Sequence[Observation], stage: str) -> Float[np.ndarray, " observations"]:
    return np.array([row.measured.stages_ms[stage] for row in observations], float)


def total_ms(observations: Sequence[Observation]) -> Float[np.ndarray, " observations"]:
    return np.array([row.measured.total_ms for row in observations], float)


def check_observations(observations: Sequence[Observation]) -> None:
    """Refuse no observations, different features, and values that are negative or not finite."""
    if not observations:
        raise UserError("There are no observations: an estimator needs some hundred measured answers.")
    expected = feature_names(observations[0].features)
    for row in observations:
        where = f"The observation of {row.configuration} on {row.sample}"
        if feature_names(row.features) != expected:
            raise UserError(f"{where} has other features than the first one: name the same ones in all.")
        if set(row.measured.stages_ms) != set(expected):
            raise UserError(
                f"{where} has measured stages {', '.join(row.measured.stages_ms)}, but features of"
                f" {', '.join(expected)}: measure the stages that have features."
            )
        values = [*row.measured.stages_ms.values(), *(x for stage in row.features.values() for x in stage.values())]
        if not (np.isfinite(values).all() and min(values) >= 0 and 0 < row.measured.total_ms < np.inf):
            raise UserError(f"{where} holds a number that is negative or not finite: leave failed measurements out.")


def feature_names(features: Mapping[str, Mapping[str, object]]) -> dict[str, set[str]]:
    """The names of the features, by stage."""
    return {stage: set(names) for stage, names in features.items()}


def fit_coefficients(observations: Sequence[Observation]) -> Coefficients:
    """Fit each stage to its own features."""
    total, coefficients = total_ms(observations), {}
    for stage, features in feature_columns(observations).items():
        work = np.stack([*features.values(), np.ones(len(observations))], axis=1)
        fitted = nonnegative_median_regression(work, stage_ms(observations, stage), total)
        coefficients[stage] = dict(zip([*features, INTERCEPT], map(float, fitted), strict=True))
    return coefficients


def rescale_coefficients(coefficients: Coefficients, observations: Sequence[Observation]) -> Coefficients:
    """The same coefficients with a factor and an added intercept per stage: only two numbers per stage are fitted."""
    estimated = predict_stages(coefficients, feature_columns(observations))
    total, rescaled = total_ms(observations), {}
    for stage, before in coefficients.items():
        work = np.stack([estimated[stage], np.ones(len(observations))], axis=1)
        factor, intercept = map(float, nonnegative_median_regression(work, stage_ms(observations, stage), total))
        rescaled[stage] = {name: factor * coefficient for name, coefficient in before.items()}
        rescaled[stage][INTERCEPT] += intercept
    return rescaled


def predict_stages(coefficients: Coefficients, columns: Columns) -> dict[str, Float[np.ndarray, " rows"]]:
    """Milliseconds of every stage, for every row."""
    rows = max(len(column) for features in columns.values() for column in features.values())
    return {
        stage: sum(
            (by_name[name] * column for name, column in columns[stage].items()), start=np.full(rows, by_name[INTERCEPT])
        )
        for stage, by_name in coefficients.items()
    }


def nonnegative_median_regression(
    work: Float[np.ndarray, "rows features"], times: Float[np.ndarray, " rows"], scale: Float[np.ndarray, " rows"]
) -> Float[np.ndarray, " features"]:
    """Coefficients c >= 0 that minimize the sum of |times - work c| / scale.

    Non-negative least squares, iteratively reweighted by the inverse of the last errors, which gives absolute errors
    (Schlossmacher 1973): robust to outliers, which timings always have.
    """
    from sklearn.linear_model import LinearRegression

    largest = np.where(work.max(0) > 0, work.max(0), 1)
    rows, targets = work / largest / scale[:, None], times / scale
    weights, scaled = np.ones(len(rows)), np.zeros(work.shape[1])
    for _ in range(_MAX_ITERATIONS):
        before = scaled
        scaled = LinearRegression(positive=True, fit_intercept=False).fit(rows, targets, sample_weight=weights).coef_
        if np.abs(scaled - before).max() <= _TOLERANCE * scaled.max():
            break
        weights = 1 / np.maximum(np.abs(targets - rows @ scaled), _MIN_ERROR)
    return scaled / largest
