"""A model's milliseconds in each of its settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from groupwise.core.errors import require
from groupwise.meter.parts import find_parts
from groupwise.meter.spans import Meter
from groupwise.meter.timing import Summary, Timing, summarise
from groupwise.workloads.controller.knobs import Knobs
from groupwise.workloads.controller.subject import Subject


def measure(
    subject: Subject,
    *,
    warm_up: int,
    runs: int,
    new_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
    after_answer: Callable[[], None] = lambda: None,
) -> dict[Knobs, Summary]:
    """Every setting in turn, round after round, so that a slow spell of the machine meets all of them."""
    require(runs >= 1, "runs", runs, "1 or more")
    require(warm_up >= 0, "warm_up", warm_up, "0 or more")
    require(new_tokens >= 1, "new_tokens", new_tokens, "1 or more")
    meter = Meter(find_parts(subject.model), clock=clock)
    seen: dict[Knobs, list[Timing]] = {knobs: [] for knobs in subject.settings}
    for run in range(warm_up + runs):
        for knobs, timings in seen.items():
            timings.append(meter.time(partial(subject.answer, knobs, run, new_tokens)))
            after_answer()
    return {knobs: summarise(timings[warm_up:]) for knobs, timings in seen.items()}
