"""The latency estimator that the user has named.
This machine's estimator of a model: profiled once, kept, and the same for all processes here.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from groupwise.core.errors import UserError, require
from groupwise.core.groups import content_hash
from groupwise.latency.estimator import LatencyEstimator
from groupwise.latency.machine import current_machine
from groupwise.latency.regression import Observation
from groupwise.workloads.controller.config import MIN_ANSWERS_FOR_QUANTILE
from groupwise.workloads.controller.latency.estimates import (
    KnobLatencyEstimator,
    KnobLatencyModel,
    ProportionalEstimator,
    architecture_fingerprint,
)
from groupwise.workloads.controller.latency.measure import probe_samples
from groupwise.workloads.controller.latency.profile import profile
from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.executor import Executor
from groupwise.workloads.controller.model.load import LoadedModel

_CACHE = "GROUPWISE_CACHE"


def cached_estimator(
    key: str, make: Callable[[], LatencyEstimator], *, model: str, folder: Path | None = None
) -> LatencyEstimator:
    """The estimator of this model on this machine, made only if there is none yet under this key.

    Ranks of one machine share it: one of them makes it while the others wait. Ranks of several machines would each find
    their own, so a run on many takes a file by name instead.
    """
    folder = folder or cache_folder() / "estimators"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{content_hash(f'{key} {current_machine()}', digest_size=8)}.json"
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            make().save(file)
    return LatencyEstimator.load(file, model=model)


def cache_folder() -> Path:
    """Where things that can be made again are kept: $GROUPWISE_CACHE, or ~/.cache/groupwise."""
    return Path(os.environ.get(_CACHE) or Path.home() / ".cache" / "groupwise")


COUNTED, OWN = "counted", "own"
OWN_SECONDS = 40.0
_MOST_SECONDS = 600.0
_QUESTION_SHARES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)


def load_estimator(
    name: str, loaded: LoadedModel, *, new_tokens: int, anyway: bool = False, question_tokens: int = 32
) -> KnobLatencyModel:
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
        return ProportionalEstimator(loaded.options)
    work = architecture_fingerprint(loaded.model)
    if name == OWN:
        make = partial(
            fit_estimator, loaded, seconds=OWN_SECONDS, new_tokens=new_tokens, question_tokens=question_tokens
        )
        fitted = cached_estimator(f"{work} {new_tokens}", make, model=work)
    else:
        fitted = LatencyEstimator.load(Path(name), model=work, anyway=anyway)
    return KnobLatencyEstimator(fitted, loaded.options, new_tokens=new_tokens)


def recalibrate(
    known: KnobLatencyEstimator, executor: Executor, samples: Sequence[Sample], *, answers: int
) -> tuple[KnobLatencyEstimator, float]:
    """Set right by so many answers of a controller, measured now; and how many times as long they take as estimated."""
    require(answers >= MIN_ANSWERS_FOR_QUANTILE, "answers", answers, f"at least {MIN_ANSWERS_FOR_QUANTILE}")
    seen = _served(known, executor, samples, answers)
    now = KnobLatencyEstimator(known.estimator.recalibrate(seen), executor.options, new_tokens=known.new_tokens)
    return now, known.estimator.pace(seen)


def current_slowdown(known: KnobLatencyEstimator, executor: Executor, samples: Sequence[Sample]) -> tuple[float, bool]:
    """A short look: how many times as long answers of a controller take now as is estimated; whether it still holds."""
    seen = _served(known, executor, samples, MIN_ANSWERS_FOR_QUANTILE)
    return known.estimator.pace(seen), known.estimator.still_holds(seen)


def _served(
    known: KnobLatencyEstimator, executor: Executor, samples: Sequence[Sample], answers: int
) -> list[Observation]:
    from groupwise.workloads.controller.serving.server import ServedTimer

    timer, tokens = ServedTimer(executor), known.new_tokens
    return profile(executor, samples, seconds=_MOST_SECONDS, measurements=answers, new_tokens=tokens, timer=timer)


def fit_estimator(
    loaded: LoadedModel, *, seconds: float, new_tokens: int = 1, question_tokens: int = 32, quantile: float = 0.95
) -> LatencyEstimator:
    """Measure answers of a model in random settings for so long, as a controller gives them, and learn from them."""
    from groupwise.workloads.controller.serving.server import ServedTimer

    executor, samples = Executor(loaded.adapter, loaded.options), profile_samples(loaded, question_tokens)
    seen = profile(executor, samples, seconds=seconds, new_tokens=new_tokens, timer=ServedTimer(executor))
    return LatencyEstimator.fit(seen, model=architecture_fingerprint(loaded.model), quantile=quantile)


def profile_samples(loaded: LoadedModel, question_tokens: int = 32) -> list[Sample]:
    """To be timed: questions of about this many tokens."""
    return probe_samples(loaded, question_tokens=[max(1, round(share * question_tokens)) for share in _QUESTION_SHARES])
