"""The latency estimator on what it has not seen, from a profiling run of the embedded model.

python bench/estimator.py [--seconds 90] [--new-tokens 4] [--cpu-time]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress

import numpy as np
from sklearn.ensemble import RandomForestRegressor

from groupwise.dist.process import configure_process
from groupwise.latency.estimator import LatencyEstimator, cross_folds
from groupwise.latency.machine import current_machine
from groupwise.latency.records import STAGES
from groupwise.latency.regression import Observation, feature_columns, stage_ms, total_ms
from groupwise.workloads.controller.latency.estimates import KnobLatencyEstimator, architecture_fingerprint
from groupwise.workloads.controller.latency.profile import profile, prompt_length, time_answer
from groupwise.workloads.controller.model.adapters import LlavaAdapter, Sample
from groupwise.workloads.controller.model.executor import Executor
from groupwise.workloads.controller.tasks.mosaic.model import load_mosaic
from groupwise.workloads.controller.tasks.mosaic.questions import make_question_set
from groupwise.workloads.controller.tasks.mosaic.scene import HandwritingSplit
from groupwise.workloads.controller.tasks.mosaic.task import mosaic_options, mosaic_sample

FOLDS = 3
Expected = tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]
"""By stage, in total, and the high quantile of the total."""
Way = Callable[[Sequence[Observation], Sequence[Observation]], Expected]
"""Fit on the first, expect for the second."""
Folds = Callable[[Sequence[Observation]], Iterator[tuple[np.ndarray, np.ndarray]]]


def samples_of(mosaics: int) -> list[Sample]:
    exam = make_question_set(HandwritingSplit.VALIDATION, mosaics, per_type=1)
    asked = zip(exam.questions.tokens, exam.questions.lengths, strict=True)
    return [
        mosaic_sample(exam.mosaics.pixels[row // exam.questions_per_mosaic], words[:length].tolist())
        for row, (words, length) in enumerate(asked)
    ]


def by_configuration_and_sample(seen: Sequence[Observation]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return cross_folds(seen, FOLDS, seed=11)


def by_row(seen: Sequence[Observation]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    part = np.random.default_rng(11).integers(0, FOLDS, len(seen))
    return ((part != fold, part == fold) for fold in range(FOLDS))


def estimator(fitted: Sequence[Observation], tested: Sequence[Observation]) -> Expected:
    return _expected(LatencyEstimator.fit(fitted, model="mosaic"), tested)


def forest(fitted: Sequence[Observation], tested: Sequence[Observation]) -> Expected:
    """The usual way: from all features to the total; p95 by how far it is off on what it was shown."""
    trees = RandomForestRegressor(100, random_state=0).fit(_flat(fitted), total_ms(fitted))
    high = np.quantile(total_ms(fitted) / trees.predict(_flat(fitted)), 0.95)
    middle = trees.predict(_flat(tested))
    return {}, middle, middle * high


def of_another_machine(fitted: Sequence[Observation], tested: Sequence[Observation]) -> Expected:
    return _expected(LatencyEstimator.fit([_elsewhere(one) for one in fitted], model="mosaic"), tested)


def recalibrated(fitted: Sequence[Observation], tested: Sequence[Observation]) -> Expected:
    there = LatencyEstimator.fit([_elsewhere(one) for one in fitted], model="mosaic")
    few = random.Random(11).sample(list(fitted), min(100, len(fitted)))
    return _expected(there.recalibrate(few), tested)


def _expected(fitted: LatencyEstimator, tested: Sequence[Observation]) -> Expected:
    rows = fitted.predict_rows(feature_columns(tested))
    return dict(rows.stages_ms), rows.total_ms, rows.high_ms


def _flat(seen: Sequence[Observation]) -> np.ndarray:
    return np.stack([column for part in feature_columns(seen).values() for column in part.values()], axis=1)


def expect_all(way: Way, folds: Folds, seen: Sequence[Observation]) -> Expected:
    """Every observation as expected by a fit that has not seen it."""
    stages = {stage: np.zeros(len(seen)) for stage in STAGES}
    middle, high = np.zeros(len(seen)), np.zeros(len(seen))
    for fitted, tested in folds(seen):
        found, middle[tested], high[tested] = way(list(compress(seen, fitted)), list(compress(seen, tested)))
        for stage, times in found.items():
            stages[stage][tested] = times
    return stages, middle, high


def repeats_ms(seen: Sequence[Observation]) -> np.ndarray:
    """For every observation, the median total over all measurements of the same work on the same sample."""
    totals: dict[str, list[float]] = {}
    for one in seen:
        totals.setdefault(one.configuration, []).append(one.measured.total_ms)
    return np.array([np.median(totals[one.configuration]) for one in seen])


def pace(ratios: np.ndarray, reach: int = 10) -> np.ndarray:
    """How slow the machine was around each measurement: the median ratio of its neighbours, whatever they executed."""
    around = [np.r_[ratios[max(0, row - reach) : row], ratios[row + 1 : row + 1 + reach]] for row in range(len(ratios))]
    return np.array([np.median(part) for part in around])


def error(expected: np.ndarray, measured: np.ndarray) -> float:
    return float(np.median(np.abs(expected / measured - 1)))


def _elsewhere(one: Observation) -> Observation:
    """Vision 2 times as slow, prefill 0.6 times and 3 ms, decode 1.5 times."""
    stages = dict(one.measured.stages_ms)
    slower = {"vision": 2 * stages["vision"], "prefill": 0.6 * stages["prefill"] + 3, "decode": 1.5 * stages["decode"]}
    between = one.measured.total_ms - sum(stages.values())
    measured = type(one.measured)(slower, sum(slower.values()) + between)
    return Observation(one.configuration, one.sample, one.features, measured)


def predict_ms(executor: Executor, seen: Sequence[Observation], sample: Sample, new_tokens: int) -> tuple[int, float]:
    """Median milliseconds to estimate all settings of a sample, and how many there are."""
    asked = KnobLatencyEstimator(LatencyEstimator.fit(seen, model="mosaic"), executor.options, new_tokens=new_tokens)
    prompt_tokens = {tier: prompt_length(executor.adapter, sample, tier) for tier in executor.options.crops}
    times = []
    for _ in range(50):
        begun = time.perf_counter()
        rows = asked.rows(prompt_tokens)
        times.append(1000 * (time.perf_counter() - begun))
    return len(rows), float(np.median(times))


WAYS: dict[str, tuple[Way, Folds]] = {
    "estimator, held-out configurations + samples": (estimator, by_configuration_and_sample),
    "one forest, split by row (as it is reported)": (forest, by_row),
    "one forest, held out (as it is)": (forest, by_configuration_and_sample),
    "estimator of another machine, as it is": (of_another_machine, by_configuration_and_sample),
    "  recalibrated from 100 measurements": (recalibrated, by_configuration_and_sample),
}


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--seconds", type=float, default=90.0)
    flags.add_argument("--new-tokens", type=int, default=4)
    flags.add_argument("--cpu-time", action="store_true", help="the processor's clock, where others keep it busy")
    given = flags.parse_args()
    clock = "processor" if given.cpu_time else "wall"
    timer = partial(time_answer, clock=time.process_time if given.cpu_time else time.perf_counter)
    configure_process(1)
    model, samples = load_mosaic(), samples_of(6)
    executor = Executor(LlavaAdapter(model), mosaic_options())
    seen = profile(executor, samples, seconds=given.seconds, new_tokens=given.new_tokens, timer=timer)
    configurations, distinct = {one.configuration for one in seen}, {one.sample for one in seen}
    print(f"{architecture_fingerprint(model)}, {current_machine()}")
    print(
        f"profiled {given.seconds:.0f} s, one thread, {clock} clock: {len(seen)} answers of 1 to {given.new_tokens}"
        f" tokens, {len(configurations)} configurations, {len(distinct)} samples; median"
        f" {np.median(total_ms(seen)):.1f} ms"
    )
    share = (FOLDS - 1) / FOLDS
    print(
        f"each of {FOLDS} x {FOLDS} tests: fitted on about {share * len(configurations):.0f} configurations"
        f" and {share * len(distinct):.0f} samples, tested on the other {(1 - share) * len(configurations):.0f} and"
        f" {(1 - share) * len(distinct):.0f}"
    )
    print(f"median error against                         {'single':>10} {'median of':>10} {'single, less':>13}")
    print(f"                                             {'answers':>10} {'repeats':>10} {'slow spells':>13} below p95")
    measured = total_ms(seen)
    print(f"{'the clock itself':44} {error(repeats_ms(seen), measured):11.1%}")
    for name, (way, folds) in WAYS.items():
        _, middle, high = expect_all(way, folds, seen)
        steady = error(middle * pace(measured / middle), measured)
        metrics = f"{error(middle, measured):11.1%} {error(middle, repeats_ms(seen)):10.1%} {steady:13.1%}"
        print(f"{name:44} {metrics} {(measured <= high).mean():9.1%}")
    stages, _, _ = expect_all(estimator, by_configuration_and_sample, seen)
    for stage in STAGES:
        times = stage_ms(seen, stage)
        there = times > 0
        slow = pace(times[there] / stages[stage][there])
        metrics = f"{error(stages[stage][there], times[there]):11.1%} {'':10}"
        steady = error(stages[stage][there] * slow, times[there])
        print(f"{f'  {stage}, median {np.median(times[there]):.2f} ms':44} {metrics} {steady:13.1%}")
    count, took = predict_ms(executor, seen, samples[0], given.new_tokens)
    print(f"estimating all {count} settings of a sample takes {took:.2f} ms")


if __name__ == "__main__":
    main()
