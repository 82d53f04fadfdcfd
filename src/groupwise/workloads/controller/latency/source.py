"""Which estimator a controller uses: a file, this machine's cached one, or proportional work; whether it still holds,
and recalibration."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from filelock import FileLock
from rich.console import Console

from groupwise.core.errors import UserError, require
from groupwise.core.groups import content_hash
from groupwise.core.io.files import cache_folder, ignore_message
from groupwise.dist.comm import connected
from groupwise.latency.drift import SpeedCheck, within_tolerance
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
CHECK_SECONDS = 2.0
"""How long a stored estimator is checked at most, as long as five answers do not take longer."""
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
    warn: Callable[[str], None] = ignore_message,
) -> KnobLatencyModel:
    """`name` is `proportional`, `auto` or a JSON file, which is refused if it was fitted for another model or machine,
    unless `allow_mismatch`. All ranks call it, and get the same.

    What was stored is checked with some answers, measured now: `auto` profiles again what no longer holds, of a file
    it is told.
    """
    if not name:
        raise UserError(
            "workload.estimator is empty: a budget needs estimated latencies. Name the JSON file that `groupwise"
            f" profile` has written for this model on this machine, '{AUTO}' to profile once and cache the result, or"
            f" '{PROPORTIONAL}' for latency in proportion to counted work, which is right in ratios only."
        )
    if name == PROPORTIONAL:
        return ProportionalEstimator(loaded.options)
    comm = connected()
    if name != AUTO:
        known = load_estimator_file(Path(name), loaded, new_tokens=new_tokens, allow_mismatch=allow_mismatch)
        problem = estimator_problem(known, loaded, timer_for=timer_for) if comm.is_main else None
        if problem:
            warn(
                f"The latency profile {name} {problem}. It is used as it is. For a new run, profile again; a run that"
                " is resumed or evaluated keeps the budgets it was started with, and its evaluation recalibrates the"
                " estimator that it times answers with."
            )
        return known
    fitted = _profiled(loaded, new_tokens, timer_for, warn) if comm.is_main else None
    comm.proceed()  # one rank profiles: were each to check for itself, they might disagree
    return KnobLatencyEstimator(comm.broadcast_object(fitted), loaded.options, new_tokens=new_tokens)


def _profiled(
    loaded: LoadedModel, new_tokens: int, timer_for: TimerFor, warn: Callable[[str], None]
) -> LatencyEstimator:
    architecture = architecture_fingerprint(loaded.model)

    def check(stored: LatencyEstimator) -> SpeedCheck:
        known = KnobLatencyEstimator(stored, loaded.options, new_tokens=new_tokens)
        return current_speed(known, loaded, timer_for=timer_for)

    fit = partial(fit_estimator, loaded, timer_for=timer_for, seconds=AUTO_SECONDS, new_tokens=new_tokens)
    return cached_estimator(f"{architecture} {new_tokens}", fit, check, model=architecture, warn=warn)


def load_estimator_file(
    file: Path, loaded: LoadedModel, *, new_tokens: int, allow_mismatch: bool = False
) -> KnobLatencyEstimator:
    """An estimator that `groupwise profile` has written."""
    fitted = LatencyEstimator.load(file, model=architecture_fingerprint(loaded.model), allow_mismatch=allow_mismatch)
    return KnobLatencyEstimator(fitted, loaded.options, new_tokens=new_tokens)


def cached_estimator(
    key: str,
    fit: Callable[[], LatencyEstimator],
    check: Callable[[LatencyEstimator], SpeedCheck],
    *,
    model: str,
    warn: Callable[[str], None] = ignore_message,
    folder: Path | None = None,
) -> LatencyEstimator:
    """The estimator of this model on this machine: the cached one if it still holds, else a new one.

    One that was measured on a busy machine is kept, marked, and measured again by the next caller.
    """
    folder = folder or cache_folder() / "estimators"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{content_hash(f'{FILE_FORMAT} {key} {current_machine()}', digest_size=8)}.json"
    with FileLock(file.with_suffix(".lock")):
        if file.exists():
            stored = LatencyEstimator.load(file, model=model)
            checked = None if stored.was_busy else check(stored)
            if checked and not checked.has_drifted:
                if checked.is_disturbed:
                    warn(
                        f"Other programs slow this machine down: {checked}. The stored latency profile, of a quieter"
                        " machine, is kept."
                    )
                return stored
            _print(f"Profiling again: the stored latency profile {_reason(stored, checked)}.")
        fitted = fit()
        fitted.save(file)
    if fitted.was_busy:
        warn(
            f"The latency profile of this machine {_reason(fitted)}, so estimates and budgets in ms are too long. Stop"
            " other programs and start again: a profile of a busy machine is marked, and the next run measures it"
            " again."
        )
    return fitted


def estimator_problem(known: KnobLatencyEstimator, loaded: LoadedModel, *, timer_for: TimerFor) -> str | None:
    """Why a stored estimator should not be trusted now; None where there is no reason, or where it was accepted from
    another machine."""
    stored = known.estimator
    if stored.mismatches:
        return None
    if stored.was_busy:
        return _reason(stored)
    checked = current_speed(known, loaded, timer_for=timer_for)
    return _reason(stored, checked) if checked.has_drifted else None


def _reason(stored: LatencyEstimator, checked: SpeedCheck | None = None) -> str:
    if checked is None:
        return f"was measured while other programs ran: its answers had the CPU for {stored.cpu_share:.0%} of the time"
    return f"does not hold now: {checked}"


def _print(line: str) -> None:
    Console(file=sys.stderr).print(line, highlight=False, soft_wrap=True, markup=False)


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


def current_speed(known: KnobLatencyEstimator, loaded: LoadedModel, *, timer_for: TimerFor) -> SpeedCheck:
    """A quick check on up to 40 answers to made-up questions, for two seconds and a warm-up."""
    executor = Executor(loaded.adapter, loaded.options)
    samples, timer = profile_samples(loaded), timer_for(executor)
    answers = MIN_ANSWERS_FOR_QUANTILE
    return SpeedCheck.of(known.estimator, _measure(known, executor, samples, timer, answers, CHECK_SECONDS))


def check_calibration(
    known: KnobLatencyEstimator, executor: Executor, samples: Sequence[Sample], *, timer: Timer
) -> tuple[float, bool]:
    """The slowdown of 40 answers, and whether the estimator still tells their median and their upper quantile."""
    observations = _measure(known, executor, samples, timer, MIN_ANSWERS_FOR_QUANTILE)
    slowdown = known.estimator.slowdown(observations)
    return slowdown, within_tolerance(slowdown) and known.estimator.is_calibrated(observations)


def _measure(
    known: KnobLatencyEstimator,
    executor: Executor,
    samples: Sequence[Sample],
    timer: Timer,
    answers: int,
    seconds: float = _MAX_RECALIBRATION_SECONDS,
) -> list[Observation]:
    return profile(executor, samples, seconds=seconds, measurements=answers, new_tokens=known.new_tokens, timer=timer)
