"""Profiling: measure answers in random configurations, as observations that an estimator is fitted to.

Every configuration comes once per pass, with one of the samples, and every pass has a new random order: slowdowns of
the machine affect all configurations equally, and each is measured again at other times. Every measurement is one
observation: the estimator's medians need no averages, and its quantile is that of single answers.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from rich.console import Console
from rich.progress import Progress

from groupwise.core.errors import require
from groupwise.latency.meter import LatencyMeter, find_model_parts
from groupwise.latency.records import MeasuredLatency
from groupwise.latency.regression import Observation
from groupwise.workloads.controller.latency.estimates import KnobFeatures
from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.inputs import prompt_length
from groupwise.workloads.controller.model.knobs import Knobs

_FEWEST_ANSWERS = 5
"""However slow the model is: the median of fewer says little."""
Timer = Callable[[Executor, AnswerRequest, int], MeasuredLatency]
"""Answers one request with exactly this many tokens, and times it."""


@dataclass(frozen=True)
class ProfilePoint:
    """What is measured: one configuration on one sample."""

    configuration: str
    knobs: Knobs
    sample: Sample
    new_tokens: int


def time_answer(
    executor: Executor, request: AnswerRequest, new_tokens: int, *, clock: Callable[[], float] = time.perf_counter
) -> MeasuredLatency:
    """Answer one request with exactly `new_tokens`, and time it by stage."""
    meter = LatencyMeter(find_model_parts(executor.adapter.model), clock=clock)
    return meter.time(lambda: executor.answer([request], max_new_tokens=new_tokens))


def profile(
    executor: Executor,
    samples: Sequence[Sample],
    *,
    seconds: float = 90.0,
    measurements: int | None = None,
    configurations: int = 120,
    new_tokens: int = 1,
    timer: Timer = time_answer,
) -> list[Observation]:
    """Measure answers of 1 to `new_tokens` tokens, one request at a time, after a warm-up.

    Passes over this many random configurations (at most all) repeat until the time is over, but not before there are
    five measurements, or until there are as many as asked for.
    """
    require(seconds > 0, "seconds", seconds, "above 0")
    require(configurations >= 2, "configurations", configurations, "2 or more")
    require(new_tokens >= 1, "new_tokens", new_tokens, "1 or more")
    require(len({sample.name for sample in samples}) >= 2, "The number of samples", len(samples), "2 or more")
    work, rng = KnobFeatures(executor.options), random.Random(0)
    warm_up(executor, samples, new_tokens)
    points = [replace(point, new_tokens=rng.randint(1, new_tokens)) for point in _points(executor, samples, rng)]
    message = (
        f"profiling answers for up to {seconds:.0f} s" if measurements is None else f"timing {measurements} answers"
    )
    observations = []
    for point in _until_deadline(seconds, islice(_passes(points[:configurations], rng), measurements), message):
        length = prompt_length(executor.adapter, point.sample, point.knobs.tier)
        features = work.features(point.knobs, prompt_tokens=length, new_tokens=point.new_tokens)
        measured = timer(executor, AnswerRequest(point.sample, point.knobs), point.new_tokens)
        observations.append(Observation(point.configuration, point.sample.name, features, measured))
    return observations


def warm_up(executor: Executor, samples: Sequence[Sample], new_tokens: int = 1) -> None:
    """The cheapest and the slowest configuration of every tier: first calls allocate memory and select kernels."""
    options = executor.options
    for tier in options.crops_by_tier:
        for extreme in (options.cheapest, options.full):
            executor.answer([AnswerRequest(samples[0], replace(extreme, tier=tier))], max_new_tokens=new_tokens)


def _points(executor: Executor, samples: Sequence[Sample], rng: random.Random) -> list[ProfilePoint]:
    """Each distinct computation once, named by its tier and block path. Samples are assigned evenly."""
    options = executor.options
    distinct = {
        f"{knobs.tier} {'.'.join(map(str, options.block_path(knobs)))}": knobs for knobs in options.configurations()
    }
    shuffled = rng.sample(list(samples), len(samples))
    order = rng.sample(list(distinct.items()), len(distinct))
    return [ProfilePoint(name, knobs, shuffled[index % len(samples)], 1) for index, (name, knobs) in enumerate(order)]


def _passes(points: Sequence[ProfilePoint], rng: random.Random) -> Iterator[ProfilePoint]:
    while True:
        yield from rng.sample(points, len(points))


def _until_deadline(seconds: float, points: Iterator[ProfilePoint], message: str) -> Iterator[ProfilePoint]:
    """Points until the time is over, with a progress bar on a terminal; the first few whatever they take."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        console.print(message, highlight=False)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task, started = progress.add_task("profiling", total=seconds), time.perf_counter()
        for index, point in enumerate(points):
            elapsed = time.perf_counter() - started
            progress.update(task, completed=min(elapsed, seconds))
            if elapsed >= seconds and index >= _FEWEST_ANSWERS:
                return
            yield point
