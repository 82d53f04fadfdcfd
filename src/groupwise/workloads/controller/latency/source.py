"""Which estimator a controller uses: a file, this machine's cached one, or proportional work; and recalibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from filelock import FileLock

from groupwise.core.errors import UserError, require
from groupwise.core.groups import content_hash
from groupwise.core.io.files import cache_folder
from groupwise.latency.estimator import FILE_FORMAT, LatencyEstimator
from groupwise.latency.machine import current_machine
from groupwise.latency.regression import Observation
from groupwise.workloads.controller.config import MIN_ANSWERS_FOR_QUANTILE
from groupwise.workloads.controller.latency.estimates import (
    KnobLatencyEstimator,
    KnobLatencyModel,
    ProportionalEstimator,
    architecture_fingerprint,
)
from groupwise.workloads.controller.latency.profile import Timer, profile
from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.executor import Executor
from groupwise.workloads.controller.model.load import LoadedModel

PROPORTIONAL, AUTO = "proportional", "auto"
AUTO_SECONDS = 40.0
"""How long `auto` profiles."""
_MAX_RECALIBRATION_SECONDS = 600.0
_QUESTION_LENGTHS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
"""Of the questions to profile with, as multiples of the typical length."""

TimerFor = Callable[[Executor], Timer]
"""Makes the timer of an executor's answers: as a controller serves them, with its own time, it is `ServedTimer`."""


def load_estimator(
    name: str,
    loaded: LoadedModel,
    *,
    new_tokens: int,
    timer_for: TimerFor,
    allow_mismatch: bool = False,
    question_tokens: int = 32,
) -> KnobLatencyModel:
    """`name` is `proportional`, `auto` or a JSON file, which is refused if it was fitted for another model or machine,
    unless `allow_mismatch`.
    """
    if not name:
        raise UserError(
            "workload.estimator is empty: a budget needs estimated latencies. Name the JSON file that `groupwise"
            f" profile` has written for this model on this machine, '{AUTO}' to profile once and cache the result, or"
            f" '{PROPORTIONAL}' for latency in proportion to counted work, which is right in ratios only."
        )
    if name == PROPORTIONAL:
        return ProportionalEstimator(loaded.options)
    if name != AUTO:
        return load_estimator_file(Path(name), loaded, new_tokens=new_tokens, allow_mismatch=allow_mismatch)
    fit = partial(
        fit_estimator,
        loaded,
        timer_for=timer_for,
        seconds=AUTO_SECONDS,
        new_tokens=new_tokens,
        question_tokens=question_tokens,
    )
    architecture = architecture_fingerprint(loaded.model)
    fitted = cached_estimator(f"{architecture} {new_tokens}", fit, model=architecture)
    return KnobLatencyEstimator(fitted, loaded.options, new_tokens=new_tokens)


def load_estimator_file(
    file: Path, loaded: LoadedModel, *, new_tokens: int, allow_mismatch: bool = False
) -> KnobLatencyEstimator:
    """An estimator that `groupwise profile` has written."""
    fitted = LatencyEstimator.load(file, model=architecture_fingerprint(loaded.model), allow_mismatch=allow_mismatch)
    return KnobLatencyEstimator(fitted, loaded.options, new_tokens=new_tokens)


def cached_estimator(
    key: str, fit: Callable[[], LatencyEstimator], *, model: str, folder: Path | None = None
) -> LatencyEstimator:
    """The estimator of this model on this machine, fitted only if the cache has none for this key.

    Ranks of one machine share it: one of them fits it while the others wait. Ranks of several machines would each fit
    their own, so a run on several machines should name a file instead.
    """
    folder = folder or cache_folder() / "estimators"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{content_hash(f'{FILE_FORMAT} {key} {current_machine()}', digest_size=8)}.json"
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            fit().save(file)
    return LatencyEstimator.load(file, model=model)


def fit_estimator(
    loaded: LoadedModel,
    *,
    timer_for: TimerFor,
    seconds: float,
    new_tokens: int = 1,
    question_tokens: int = 32,
    quantile: float = 0.95,
) -> LatencyEstimator:
    """Measure answers of a model in random configurations for so long, and fit an estimator to them."""
    executor, samples = Executor(loaded.adapter, loaded.options), profile_samples(loaded, question_tokens)
    observations = profile(executor, samples, seconds=seconds, new_tokens=new_tokens, timer=timer_for(executor))
    return LatencyEstimator.fit(observations, model=architecture_fingerprint(loaded.model), quantile=quantile)


def profile_samples(loaded: LoadedModel, question_tokens: int = 32) -> list[Sample]:
    """Samples to profile with: questions of about this many tokens."""
    return loaded.front_end.probe_samples([max(1, round(share * question_tokens)) for share in _QUESTION_LENGTHS])


def recalibrate(
    known: KnobLatencyEstimator, executor: Executor, samples: Sequence[Sample], *, timer: Timer, answers: int
) -> tuple[KnobLatencyEstimator, float]:
    """The estimator recalibrated with so many answers, measured now; and the slowdown: measured over estimated."""
    require(answers >= MIN_ANSWERS_FOR_QUANTILE, "answers", answers, f"at least {MIN_ANSWERS_FOR_QUANTILE}")
    observations = _measure(known, executor, samples, timer, answers)
    recalibrated = known.estimator.recalibrate(observations)
    slowdown = known.estimator.slowdown(observations)
    return KnobLatencyEstimator(recalibrated, executor.options, new_tokens=known.new_tokens), slowdown


def current_slowdown(
    known: KnobLatencyEstimator, executor: Executor, samples: Sequence[Sample], *, timer: Timer
) -> tuple[float, bool]:
    """A quick check on 40 answers: the slowdown, and whether the estimator is still calibrated."""
    observations = _measure(known, executor, samples, timer, MIN_ANSWERS_FOR_QUANTILE)
    return known.estimator.slowdown(observations), known.estimator.is_calibrated(observations)


def _measure(
    known: KnobLatencyEstimator, executor: Executor, samples: Sequence[Sample], timer: Timer, answers: int
) -> list[Observation]:
    return profile(
        executor,
        samples,
        seconds=_MAX_RECALIBRATION_SECONDS,
        measurements=answers,
        new_tokens=known.new_tokens,
        timer=timer,
    )
