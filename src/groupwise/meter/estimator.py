"""How long an answer will take: by stage and in total, with a quantile that holds for what was never measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float

from groupwise.core.errors import UserError
from groupwise.meter.calibration import Ratios, conformal, unseen_ratios
from groupwise.meter.estimator_file import read, write
from groupwise.meter.latency import Estimated
from groupwise.meter.machine import Machine, current_machine
from groupwise.meter.observation import (
    Columns,
    Features,
    Observation,
    check_observations,
    columns_of,
    shape_of,
    total_ms,
)
from groupwise.meter.prices import CONSTANT, Prices, fit_prices, scale_prices, stages_at


@dataclass(frozen=True)
class EstimatedRows:
    """`Estimated` for many answers at once."""

    stages_ms: Mapping[str, Float[np.ndarray, " rows"]]
    total_ms: Float[np.ndarray, " rows"]
    high_ms: Float[np.ndarray, " rows"]
    quantile: float

    def __len__(self) -> int:
        return len(self.total_ms)

    def __getitem__(self, row: int) -> Estimated:
        stages = {stage: float(times[row]) for stage, times in self.stages_ms.items()}
        return Estimated(stages, float(self.total_ms[row]), float(self.high_ms[row]), self.quantile)


@dataclass(frozen=True)
class Estimator:
    """Prices of named work for one model on one machine. The same features always give the same estimate."""

    prices: Prices
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
    ) -> Estimator:
        """Learn from answers that were measured on this machine, or on the one that is named."""
        check_observations(observations)
        ratios = unseen_ratios(observations, fit_prices)
        never = {
            stage: [name for name, column in features.items() if not column.any()]
            for stage, features in columns_of(observations).items()
        }
        fitted = Estimator(fit_prices(observations), never, ratios, model, machine or current_machine())
        return fitted.at(quantile)

    def at(self, quantile: float) -> Estimator:
        """The same with another quantile."""
        conformal(self.ratios, quantile)  # refuses one that the observations cannot tell
        return replace(self, quantile=quantile)

    def predict(self, features: Features) -> Estimated:
        """One answer."""
        one = {stage: {name: np.array([value]) for name, value in part.items()} for stage, part in features.items()}
        return self.predict_rows(one)[0]

    def predict_rows(self, columns: Columns) -> EstimatedRows:
        """Many answers at once."""
        self._check(columns)
        stages = stages_at(self.prices, columns)
        whole = sum(stages.values(), start=np.zeros(1))
        high = whole * conformal(self.ratios, self.quantile)
        return EstimatedRows(stages, whole * float(np.median(self.ratios)), high, self.quantile)

    def recalibrate(self, observations: Sequence[Observation], *, machine: Machine | None = None) -> Estimator:
        """The same model on this machine, or on the one that is named: 100 measurements are enough.

        Each stage gets a factor and a constant; how far measurements stray is learnt anew.
        """
        check_observations(observations)
        self._check(columns_of(observations))
        scaled = replace(
            self,
            prices=scale_prices(self.prices, observations),
            ratios=unseen_ratios(observations, lambda part: scale_prices(self.prices, part)),
            machine=machine or current_machine(),
            differs={name: text for name, text in self.differs.items() if name == "model"},
        )
        return scaled.at(self.quantile)

    def pace(self, observations: Sequence[Observation]) -> float:
        """How many times as long answers take, in the median, as is estimated."""
        return float(np.median(total_ms(observations) / self.predict_rows(columns_of(observations)).total_ms))

    def still_holds(self, observations: Sequence[Observation]) -> bool:
        """Whether answers keep to it: no more than three times as many as it says exceed its high quantile."""
        above = total_ms(observations) > self.predict_rows(columns_of(observations)).high_ms
        return bool(above.mean() <= 3 * (1 - self.quantile))

    def save(self, path: Path) -> None:
        """A JSON file, whole or not at all."""
        write(path, asdict(self) | {"ratios": self.ratios.tolist()})

    @staticmethod
    def load(path: Path, *, model: str, machine: Machine | None = None, anyway: bool = False) -> Estimator:
        """Refuse the estimator of another model or machine, unless it is wanted anyway: then `differs` tells."""
        saved = read(path)
        fitted = Estimator(**saved | {"ratios": np.array(saved["ratios"]), "machine": Machine(**saved["machine"])})
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
        given, wanted = shape_of(columns), {stage: set(part) - {CONSTANT} for stage, part in self.prices.items()}
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
