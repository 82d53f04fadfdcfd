"""A short run that measures answers, for an estimator to learn from.

Every configuration comes once in a pass, with a sample of its own, in an order that is drawn anew for every pass. So a
slow spell of the machine meets all of them alike, and each is measured again at other times. Every measurement is an
observation of its own: the estimator's medians need no averages, and its quantile is one of single answers.
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
from groupwise.workloads.controller.model.adapters import ModelAdapter, Sample
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.knobs import Knobs

Timer = Callable[[Executor, AnswerRequest, int], MeasuredLatency]


@dataclass(frozen=True)
class ProfilePoint:
    """What is measured: one configuration on one sample."""

    configuration: str
    knobs: Knobs
    sample: Sample
    new_tokens: int


def prompt_length(adapter: ModelAdapter, sample: Sample, tier: str) -> int:
    """Tokens of the prompt: words and image."""
    return len(sample.before) + adapter.image_tokens(sample.crops[tier]) + len(sample.question)


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

    Passes over this many random configurations (or all there are) go on until the time is over, or until there are as
    many measurements as are wanted.
    """
    require(seconds > 0, "seconds", seconds, "above 0")
    require(configurations >= 2, "configurations", configurations, "2 or more")
    require(new_tokens >= 1, "new_tokens", new_tokens, "1 or more")
    require(len({sample.name for sample in samples}) >= 2, "The number of samples", len(samples), "2 or more")
    work, chance = KnobFeatures(executor.options), random.Random(0)
    observations = []
    warm_up(executor, samples, new_tokens)
    pairs = [replace(pair, new_tokens=chance.randint(1, new_tokens)) for pair in _pairs(executor, samples, chance)]
    told = f"profiling answers for up to {seconds:.0f} s" if measurements is None else f"timing {measurements} answers"
    for pair in _until_deadline(seconds, islice(_passes(pairs[:configurations], chance), measurements), told):
        length = prompt_length(executor.adapter, pair.sample, pair.knobs.tier)
        features = work.features(pair.knobs, prompt_tokens=length, new_tokens=pair.new_tokens)
        measured = timer(executor, AnswerRequest(pair.sample, pair.knobs), pair.new_tokens)
        observations.append(Observation(pair.configuration, pair.sample.name, features, measured))
    return observations


def warm_up(executor: Executor, samples: Sequence[Sample], new_tokens: int = 1) -> None:
    """The cheapest and the dearest setting of every tier: first calls allocate, and look up their kernels."""
    options = executor.options
    for tier in options.crops:
        for ends in (options.cheapest, options.full):
            knobs = Knobs(tier, ends.insertion_position, ends.top_k, ends.blocks)
            executor.answer([AnswerRequest(samples[0], knobs)], max_new_tokens=new_tokens)


def _pairs(executor: Executor, samples: Sequence[Sample], chance: random.Random) -> list[ProfilePoint]:
    """Each distinct computation once, by the path of its knobs. Samples are dealt out evenly."""
    named = {
        f"{knobs.tier} {'.'.join(map(str, executor.options.path(knobs)))}": knobs for knobs in executor.options.all()
    }
    shuffled = chance.sample(list(samples), len(samples))
    order = chance.sample(list(named.items()), len(named))
    return [ProfilePoint(name, knobs, shuffled[nth % len(samples)], 1) for nth, (name, knobs) in enumerate(order)]


def _passes(pairs: Sequence[ProfilePoint], chance: random.Random) -> Iterator[ProfilePoint]:
    while True:
        yield from chance.sample(pairs, len(pairs))


def _until_deadline(seconds: float, pairs: Iterator[ProfilePoint], told: str) -> Iterator[ProfilePoint]:
    """Go on until the time is over; a bar shows how far it is."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        console.print(told, highlight=False)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task, begun = progress.add_task("profiling", total=seconds), time.perf_counter()
        for pair in pairs:
            passed = time.perf_counter() - begun
            progress.update(task, completed=min(passed, seconds))
            if passed >= seconds:
                return
            yield pair
