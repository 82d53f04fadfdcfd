"""How long an answer will take: by stage and in total, with a quantile that holds for what was never measured.
How far measurements stray from what was expected of them without having been seen.
The file of an estimator: few numbers, in JSON that people can read.
"""

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
from groupwise.core.files import write_atomic
from groupwise.latency.machine import Machine, current_machine
from groupwise.latency.records import EstimatedLatency
from groupwise.latency.regression import (
    INTERCEPT,
    Coefficients,
    Columns,
    Observation,
    WorkFeatures,
    check_observations,
    feature_columns,
    feature_names,
    fit_coefficients,
    predict_stages,
    rescale_coefficients,
    total_ms,
)

FOLDS = 3
Ratios = Float[np.ndarray, " observations"]


def held_out_ratios(
    observations: Sequence[Observation], fit: Callable[[Sequence[Observation]], Coefficients]
) -> Ratios:
    """Measured total / expected sum of stages, from low to high.

    Each expectation comes from a fit to other configurations and other samples.
    """
    ratios = np.zeros(len(observations))
    for fitted, tested in cross_folds(observations):
        prices, seen = fit(list(compress(observations, fitted))), list(compress(observations, tested))
        expected = predict_stages(prices, feature_columns(seen))
        ratios[tested] = total_ms(seen) / sum(expected.values())
    return np.sort(ratios)


def cross_folds(
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


def conformal_quantile(ratios: Ratios, quantile: float) -> float:
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


_FORMAT = "groupwise latency estimator 1"
_FIELDS = {"prices", "never_seen", "ratios", "model", "machine", "quantile", "differs"}


def write(path: Path, fields: Mapping[str, Any]) -> None:
    """Whole or not at all; floats come back bit by bit."""
    assert set(fields) == _FIELDS
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps({"format": _FORMAT, **fields}, indent=1, allow_nan=False) + "\n").encode())


def read(path: Path) -> dict[str, Any]:
    """The fields; refused if there is no such file or it holds something else."""
    if not path.is_file():
        raise UserError(f"There is no estimator in {path}: profile the model and save one, or name another file.")
    try:
        held = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}). Delete it, profile and save the estimator again.") from error
    if not isinstance(held, dict) or held.pop("format", None) != _FORMAT or set(held) != _FIELDS:
        raise UserError(f"{path} does not hold a {_FORMAT}. Name another file, or profile and save one.")
    return held


@dataclass(frozen=True)
class EstimatedRows:
    """`EstimatedLatency` for many answers at once."""

    stages_ms: Mapping[str, Float[np.ndarray, " rows"]]
    total_ms: Float[np.ndarray, " rows"]
    high_ms: Float[np.ndarray, " rows"]
    quantile: float

    def __len__(self) -> int:
        return len(self.total_ms)

    def __getitem__(self, row: int) -> EstimatedLatency:
        stages = {stage: float(times[row]) for stage, times in self.stages_ms.items()}
        return EstimatedLatency(stages, float(self.total_ms[row]), float(self.high_ms[row]), self.quantile)


@dataclass(frozen=True)
class LatencyEstimator:
    """Prices of named work for one model on one machine. The same features always give the same estimate."""

    prices: Coefficients
    never_seen: Mapping[str, Sequence[str]]
    """By stage, features that were 0 in all observations: their price is not known."""
    ratios: Ratios
    """Measured total / expected sum of stages, for configurations and samples that were held out. Medians do not add
    up, and some time lies between stages: the median of these ratios sets it right, their quantile is the high one."""
    model: str
    machine: Machine
    quantile: float = 0.95
    differs: Mapping[str, str] = field(default_factory=dict)
    """What is not the same here as where it was fitted, by name; empty unless it was loaded anyway."""

    @staticmethod
    def fit(
        observations: Sequence[Observation], *, model: str, quantile: float = 0.95, machine: Machine | None = None
    ) -> LatencyEstimator:
        """Learn from answers that were measured on this machine, or on the one that is named."""
        check_observations(observations)
        ratios = held_out_ratios(observations, fit_coefficients)
        never = {
            stage: [name for name, column in features.items() if not column.any()]
            for stage, features in feature_columns(observations).items()
        }
        fitted = LatencyEstimator(fit_coefficients(observations), never, ratios, model, machine or current_machine())
        return fitted.at(quantile)

    def at(self, quantile: float) -> LatencyEstimator:
        """The same with another quantile."""
        conformal_quantile(self.ratios, quantile)  # refuses one that the observations cannot tell
        return replace(self, quantile=quantile)

    def predict(self, features: WorkFeatures) -> EstimatedLatency:
        """One answer."""
        one = {stage: {name: np.array([value]) for name, value in part.items()} for stage, part in features.items()}
        return self.predict_rows(one)[0]

    def predict_rows(self, columns: Columns) -> EstimatedRows:
        """Many answers at once."""
        self._check(columns)
        stages = predict_stages(self.prices, columns)
        whole = sum(stages.values(), start=np.zeros(1))
        high = whole * conformal_quantile(self.ratios, self.quantile)
        return EstimatedRows(stages, whole * float(np.median(self.ratios)), high, self.quantile)

    def recalibrate(self, observations: Sequence[Observation], *, machine: Machine | None = None) -> LatencyEstimator:
        """The same model on this machine, or on the one that is named: 100 measurements are enough.

        Each stage gets a factor and a constant; how far measurements stray is learnt anew.
        """
        check_observations(observations)
        self._check(feature_columns(observations))
        scaled = replace(
            self,
            prices=rescale_coefficients(self.prices, observations),
            ratios=held_out_ratios(observations, lambda part: rescale_coefficients(self.prices, part)),
            machine=machine or current_machine(),
            differs={name: text for name, text in self.differs.items() if name == "model"},
        )
        return scaled.at(self.quantile)

    def pace(self, observations: Sequence[Observation]) -> float:
        """How many times as long answers take, in the median, as is estimated."""
        return float(np.median(total_ms(observations) / self.predict_rows(feature_columns(observations)).total_ms))

    def still_holds(self, observations: Sequence[Observation]) -> bool:
        """Whether answers keep to it: no more than three times as many as it says exceed its high quantile."""
        above = total_ms(observations) > self.predict_rows(feature_columns(observations)).high_ms
        return bool(above.mean() <= 3 * (1 - self.quantile))

    def save(self, path: Path) -> None:
        """A JSON file, whole or not at all."""
        write(path, asdict(self) | {"ratios": self.ratios.tolist()})

    @staticmethod
    def load(path: Path, *, model: str, machine: Machine | None = None, anyway: bool = False) -> LatencyEstimator:
        """Refuse the estimator of another model or machine, unless it is wanted anyway: then `differs` tells."""
        saved = read(path)
        fitted = LatencyEstimator(
            **saved | {"ratios": np.array(saved["ratios"]), "machine": Machine(**saved["machine"])}
        )
        differs = fitted.machine.differences(machine or current_machine())
        differs |= {"model": f"{fitted.model}, not {model}"} if fitted.model != model else {}
        if differs and not anyway:
            told = ", ".join(f"{name} {text}" for name, text in differs.items())
            hint = (
                f" Call torch.set_num_threads({fitted.machine.threads}) first." if list(differs) == ["threads"] else ""
            )
            raise UserError(
                f"The estimator in {path} was fitted for {told}.{hint} Profile here and fit a new one; or load it with"
                " anyway=True and recalibrate it from 100 measurements of the same model on this machine; or use it"
                " with anyway=True as it is: its times are not of here."
            )
        return replace(fitted, differs=differs)

    def _check(self, columns: Columns) -> None:
        given, wanted = feature_names(columns), {stage: set(part) - {INTERCEPT} for stage, part in self.prices.items()}
        if given != wanted:
            raise UserError(
                f"This estimator was fitted with the features {_listed(wanted)}; it was given {_listed(given)}. Pass"
                " the ones it knows, or profile and fit it anew."
            )
        unknown = [
            f"{stage}.{name}" for stage, part in self.never_seen.items() for name in part if columns[stage][name].any()
        ]
        if unknown:
            raise UserError(
                f"{', '.join(unknown)} was 0 in all observations of this estimator, so its price is not known. Profile"
                " answers in which it occurs."
            )


def _listed(names: Mapping[str, set[str]]) -> str:
    return ", ".join(f"{stage}.{name}" for stage, part in names.items() for name in sorted(part))
