"""LatencyEstimator: fit, predict with a conformal quantile, recalibrate, save, load."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from groupwise.core.errors import UserError
from groupwise.core.io.files import parse_json, write_atomic
from groupwise.latency.busy import cpu_share, is_busy
from groupwise.latency.machine import Machine, current_machine
from groupwise.latency.records import EstimatedLatency
from groupwise.latency.regression import (
    INTERCEPT,
    Coefficients,
    Columns,
    Observation,
    check_observations,
    feature_columns,
    feature_names,
    fit_coefficients,
    predict_stages,
    rescale_coefficients,
    total_ms,
)

FOLDS = 3
FILE_FORMAT = "groupwise latency estimator 2"
_FILE_FIELDS = ("coefficients", "unobserved_features", "ratios", "model", "machine", "quantile")
_OPTIONAL_FIELDS = ("cpu_share",)
Ratios = Float[np.ndarray, " observations"]


@dataclass(frozen=True)
class EstimatedRows:
    """`EstimatedLatency` of many answers."""

    stages_ms: Mapping[str, Float[np.ndarray, " rows"]]
    total_ms: Float[np.ndarray, " rows"]
    upper_ms: Float[np.ndarray, " rows"]
    quantile: float

    def __len__(self) -> int:
        return len(self.total_ms)

    def __getitem__(self, row: int) -> EstimatedLatency:
        stages_ms = {stage: float(times[row]) for stage, times in self.stages_ms.items()}
        return EstimatedLatency(stages_ms, float(self.total_ms[row]), float(self.upper_ms[row]), self.quantile)


@dataclass(frozen=True)
class LatencyEstimator:
    """Milliseconds per unit of work of one model on one machine. The same features always give the same estimate."""

    coefficients: Coefficients
    unobserved_features: Mapping[str, Sequence[str]]
    """By stage, features that were 0 in all observations: their coefficients are unknown."""
    ratios: Ratios
    """Measured total / estimated sum of stages, sorted, for held-out configurations and samples. Medians do not add up,
    and some time passes between stages: the median ratio corrects the total, a quantile of the ratios gives the upper
    bound."""
    model: str
    machine: Machine
    quantile: float = 0.95
    cpu_share: float | None = None
    """Of the time of the answers it was fitted to, the part in which they had the CPU; None where that is not known."""
    mismatches: Mapping[str, str] = field(default_factory=dict)
    """What differs here from where it was fitted, by name; empty unless it was loaded with `allow_mismatch`."""

    @staticmethod
    def fit(
        observations: Sequence[Observation], *, model: str, quantile: float = 0.95, machine: Machine | None = None
    ) -> LatencyEstimator:
        """Fit to answers measured on this machine, or on the one that is named."""
        check_observations(observations)
        ratios = held_out_ratios(observations, fit_coefficients)
        unobserved = {
            stage: [name for name, column in features.items() if not column.any()]
            for stage, features in feature_columns(observations).items()
        }
        coefficients = fit_coefficients(observations)
        share = cpu_share([row.measured for row in observations])
        machine = machine or current_machine()
        return LatencyEstimator(coefficients, unobserved, ratios, model, machine, cpu_share=share).with_quantile(
            quantile
        )

    @property
    def was_busy(self) -> bool:
        """Whether other programs took time from the answers it was fitted to: its estimates are too long."""
        return is_busy(self.cpu_share)

    def with_quantile(self, quantile: float) -> LatencyEstimator:
        """The same estimator with another quantile for `upper_ms`."""
        conformal_quantile(self.ratios, quantile)  # refuses one that needs more observations
        return replace(self, quantile=quantile)

    def predict_rows(self, columns: Columns) -> EstimatedRows:
        """Estimate many answers."""
        self._check(columns)
        stages_ms = predict_stages(self.coefficients, columns)
        sum_ms = sum(stages_ms.values(), start=np.zeros(1))
        upper_ms = sum_ms * conformal_quantile(self.ratios, self.quantile)
        return EstimatedRows(stages_ms, sum_ms * float(np.median(self.ratios)), upper_ms, self.quantile)

    def recalibrate(self, observations: Sequence[Observation], *, machine: Machine | None = None) -> LatencyEstimator:
        """The same model on this machine, or on the one that is named: 100 observations are enough.

        Each stage gets a factor and an added intercept; the ratios are computed anew.
        """
        check_observations(observations)
        self._check(feature_columns(observations))
        recalibrated = replace(
            self,
            coefficients=rescale_coefficients(self.coefficients, observations),
            ratios=held_out_ratios(observations, lambda rows: rescale_coefficients(self.coefficients, rows)),
            machine=machine or current_machine(),
            cpu_share=cpu_share([row.measured for row in observations]),
            mismatches={name: text for name, text in self.mismatches.items() if name == "model"},
        )
        return recalibrated.with_quantile(self.quantile)

    def slowdown(self, observations: Sequence[Observation]) -> float:
        """Median of measured / estimated total: 1.5 where answers now take half as long again."""
        return float(np.median(total_ms(observations) / self.predict_rows(feature_columns(observations)).total_ms))

    def is_calibrated(self, observations: Sequence[Observation]) -> bool:
        """Whether at most three times as many answers exceed `upper_ms` as its quantile allows."""
        above = total_ms(observations) > self.predict_rows(feature_columns(observations)).upper_ms
        return bool(above.mean() <= 3 * (1 - self.quantile))

    def save(self, path: Path) -> None:
        """Write a JSON file, atomically. What differed from this machine is not saved: loading compares anew."""
        fields = asdict(self) | {"ratios": self.ratios.tolist()}
        known = [name for name in _OPTIONAL_FIELDS if fields[name] is not None]
        write_fields(path, {name: fields[name] for name in (*_FILE_FIELDS, *known)})

    @staticmethod
    def load(
        path: Path, *, model: str, machine: Machine | None = None, allow_mismatch: bool = False
    ) -> LatencyEstimator:
        """Refuse the estimator of another model or machine, unless `allow_mismatch`: then `mismatches` names both."""
        saved = read_fields(path)
        fitted = LatencyEstimator(
            **saved | {"ratios": np.array(saved["ratios"]), "machine": Machine(**saved["machine"])}
        )
        mismatches = fitted.machine.differences(machine or current_machine())
        mismatches |= {"model": f"{fitted.model}, not {model}"} if fitted.model != model else {}
        if mismatches and not allow_mismatch:
            raise UserError(_mismatch_message(path, fitted, mismatches))
        return replace(fitted, mismatches=mismatches)

    def _check(self, columns: Columns) -> None:
        given = feature_names(columns)
        expected = {stage: set(by_name) - {INTERCEPT} for stage, by_name in self.coefficients.items()}
        if given != expected:
            raise UserError(
                f"This estimator was fitted with the features {_join_names(expected)}; it was given"
                f" {_join_names(given)}. Pass the features it was fitted with, or profile and fit it again."
            )
        unknown = [
            f"{stage}.{name}"
            for stage, names in self.unobserved_features.items()
            for name in names
            if columns[stage][name].any()
        ]
        if unknown:
            raise UserError(
                f"{', '.join(unknown)} was 0 in all observations of this estimator, so its coefficient is unknown."
                " Profile answers in which it occurs."
            )


def held_out_ratios(
    observations: Sequence[Observation], fit: Callable[[Sequence[Observation]], Coefficients]
) -> Ratios:
    """Measured total / estimated sum of stages, sorted.

    Each estimate comes from a fit to other configurations and other samples.
    """
    ratios = np.zeros(len(observations))
    for in_fit, in_test in cross_folds(observations):
        coefficients, test_rows = fit(list(compress(observations, in_fit))), list(compress(observations, in_test))
        estimated = predict_stages(coefficients, feature_columns(test_rows))
        ratios[in_test] = total_ms(test_rows) / sum(estimated.values())
    return np.sort(ratios)


def cross_folds(
    observations: Sequence[Observation], folds: int = FOLDS, seed: int = 0
) -> Iterator[tuple[Bool[np.ndarray, " observations"], Bool[np.ndarray, " observations"]]]:
    """(in fit, in test): no configuration and no sample is in both. Every observation is tested once."""
    configurations = _assign_folds([row.configuration for row in observations], folds, seed, "configuration")
    samples = _assign_folds([row.sample for row in observations], folds, seed + 1, "sample")
    for configuration_fold in range(folds):
        for sample_fold in range(folds):
            in_fit = (configurations != configuration_fold) & (samples != sample_fold)
            in_test = (configurations == configuration_fold) & (samples == sample_fold)
            if in_test.any() and not in_fit.any():
                raise UserError(
                    f"{len(observations)} observations leave nothing to fit on when a configuration and a sample are"
                    " held out. Measure more of both, in any combination."
                )
            if in_test.any():
                yield in_fit, in_test


def conformal_quantile(ratios: Ratios, quantile: float) -> float:
    """The ceil((n + 1) x quantile)-th smallest of n sorted ratios: a new one is below it with that probability."""
    if not 0.5 <= quantile < 1:
        raise UserError(f"quantile is {quantile}: it must be from 0.5 to below 1.")
    rank = int(np.ceil((len(ratios) + 1) * quantile - 1e-9))
    if rank > len(ratios):
        needed = int(np.ceil(quantile / (1 - quantile) - 1e-9))
        raise UserError(
            f"{len(ratios)} observations are too few for a quantile of {quantile}: it takes at least {needed}. Measure"
            " longer, or take a smaller quantile."
        )
    return float(ratios[rank - 1])


def write_fields(path: Path, fields: Mapping[str, Any]) -> None:
    """Floats are read back bit-identical."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FILE_FORMAT, **fields}, indent=1, allow_nan=False) + "\n"
    write_atomic(path, text.encode())


def read_fields(path: Path) -> dict[str, Any]:
    """Refuse a missing file and one that holds something else."""
    if not path.is_file():
        raise UserError(
            f"There is no estimator in {path}. Write one with `groupwise profile MODEL --output {path}`, or name"
            " another file."
        )
    try:
        fields = parse_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}). Delete it and profile again.") from error
    is_estimator = isinstance(fields, dict) and fields.pop("format", None) == FILE_FORMAT
    if not is_estimator or set(fields) - set(_OPTIONAL_FIELDS) != set(_FILE_FIELDS):
        raise UserError(f"{path} does not hold a {FILE_FORMAT}. Name another file, or profile the model again.")
    return fields


def _assign_folds(names: Sequence[str], folds: int, seed: int, kind: str) -> np.ndarray:
    """The fold of each name: drawn from the names alone, whatever their order."""
    distinct = sorted(set(names))
    if len(distinct) < 2:
        raise UserError(
            f"All observations share one {kind}, {distinct[0]!r}: an estimator is tested on held-out ones. Measure at"
            " least two, better some dozens."
        )
    order = np.random.default_rng(seed).permutation(len(distinct))
    fold = {name: int(position) % folds for name, position in zip(distinct, order, strict=True)}
    return np.array([fold[name] for name in names])


def _mismatch_message(path: Path, fitted: LatencyEstimator, mismatches: Mapping[str, str]) -> str:
    differences = ", ".join(f"{name} {text}" for name, text in mismatches.items())
    only_threads = list(mismatches) == ["threads"]
    hint = f" Call torch.set_num_threads({fitted.machine.threads}) first." if only_threads else ""
    return (
        f"The estimator in {path} was fitted for {differences}.{hint} Profile here and fit a new one; or load it with"
        " allow_mismatch=True and recalibrate it from 100 measurements of the same model on this machine; or use it"
        " with allow_mismatch=True as it is, with latencies measured on other hardware."
    )


def _join_names(names: Mapping[str, set[str]]) -> str:
    return ", ".join(f"{stage}.{name}" for stage, by_stage in names.items() for name in sorted(by_stage))
