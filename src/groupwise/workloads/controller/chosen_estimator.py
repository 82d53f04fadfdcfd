"""The latency estimator that the user has named."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from groupwise.core.errors import UserError, require
from groupwise.meter.estimator import Estimator
from groupwise.meter.observation import Observation
from groupwise.workloads.controller.adapter import Sample
from groupwise.workloads.controller.config import FEWEST_FOR_A_QUANTILE
from groupwise.workloads.controller.estimates import CountedWork, LatencyEstimator
from groupwise.workloads.controller.executor import Executor
from groupwise.workloads.controller.knob_estimator import KnobEstimator, work_identity
from groupwise.workloads.controller.loading import LoadedModel
from groupwise.workloads.controller.own_estimator import own_estimator
from groupwise.workloads.controller.profile import profile
from groupwise.workloads.controller.serving_timer import ServingTimer
from groupwise.workloads.controller.subject import probes

COUNTED, OWN = "counted", "own"
OWN_SECONDS = 40.0
_MOST_SECONDS = 600.0
_QUESTION_SHARES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)


def chosen_estimator(
    name: str, loaded: LoadedModel, *, new_tokens: int, anyway: bool = False, question_tokens: int = 32
) -> LatencyEstimator:
    """The one in a JSON file, refused if it was fitted elsewhere and is not wanted anyway; or this machine's own; or
    counted work, by name.
    """
    if not name:
        raise UserError(
            "workload.estimator is empty: a budget needs to know what answers take. Name the JSON file that"
            f" `groupwise profile` has made for this model on this machine, '{OWN}' to profile once and keep it, or"
            f" '{COUNTED}' for times in proportion to counted work, which are right in ratios only."
        )
    if name == COUNTED:
        return CountedWork(loaded.options)
    work = work_identity(loaded.model)
    if name == OWN:
        make = partial(
            profiled_estimator, loaded, seconds=OWN_SECONDS, new_tokens=new_tokens, question_tokens=question_tokens
        )
        fitted = own_estimator(f"{work} {new_tokens}", make, model=work)
    else:
        fitted = Estimator.load(Path(name), model=work, anyway=anyway)
    return KnobEstimator(fitted, loaded.options, new_tokens=new_tokens)


def recalibrated(
    known: KnobEstimator, executor: Executor, samples: Sequence[Sample], *, answers: int
) -> tuple[KnobEstimator, float]:
    """Set right by so many answers of a controller, measured now; and how many times as long they take as estimated."""
    require(answers >= FEWEST_FOR_A_QUANTILE, "answers", answers, f"at least {FEWEST_FOR_A_QUANTILE}")
    seen = _served(known, executor, samples, answers)
    now = KnobEstimator(known.estimator.recalibrate(seen), executor.options, new_tokens=known.new_tokens)
    return now, known.estimator.pace(seen)


def pace_now(known: KnobEstimator, executor: Executor, samples: Sequence[Sample]) -> tuple[float, bool]:
    """A short look: how many times as long answers of a controller take now as is estimated; whether it still holds."""
    seen = _served(known, executor, samples, FEWEST_FOR_A_QUANTILE)
    return known.estimator.pace(seen), known.estimator.still_holds(seen)


def _served(known: KnobEstimator, executor: Executor, samples: Sequence[Sample], answers: int) -> list[Observation]:
    timer, tokens = ServingTimer(executor), known.new_tokens
    return profile(executor, samples, seconds=_MOST_SECONDS, measurements=answers, new_tokens=tokens, timer=timer)


def profiled_estimator(
    loaded: LoadedModel, *, seconds: float, new_tokens: int = 1, question_tokens: int = 32, quantile: float = 0.95
) -> Estimator:
    """Measure answers of a model in random settings for so long, as a controller gives them, and learn from them."""
    executor, samples = Executor(loaded.adapter, loaded.options), typical_samples(loaded, question_tokens)
    seen = profile(executor, samples, seconds=seconds, new_tokens=new_tokens, timer=ServingTimer(executor))
    return Estimator.fit(seen, model=work_identity(loaded.model), quantile=quantile)


def typical_samples(loaded: LoadedModel, question_tokens: int = 32) -> list[Sample]:
    """To be timed: questions of about this many tokens."""
    return probes(loaded, question_tokens=[max(1, round(share * question_tokens)) for share in _QUESTION_SHARES])
