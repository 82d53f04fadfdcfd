"""Error of the latency estimator on held-out answers, from a profiling run of the embedded model.

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
from groupwise.workloads.controller.latency.profile import profile, time_answer
from groupwise.workloads.controller.model.adapters import LlavaAdapter, Sample
from groupwise.workloads.controller.model.executor import Executor
from groupwise.workloads.controller.model.inputs import prompt_length
from groupwise.workloads.controller.tasks.mosaic.model import load_mosaic, mosaic_options, mosaic_sample
from groupwise.workloads.controller.tasks.mosaic.questions import make_question_set
from groupwise.workloads.controller.tasks.mosaic.scene import HandwritingSplit

FOLDS = 3
Estimate = tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]
"""Milliseconds by stage, in total, and the upper quantile of the total."""
Method = Callable[[Sequence[Observation], Sequence[Observation]], Estimate]
"""Fit on the first, estimate the second."""
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


def estimator(fitted: Sequence[Observation], tested: Sequence[Observation]) -> Estimate:
    return _estimate(LatencyEstimator.fit(fitted, model="mosaic"), tested)


def forest(fitted: Sequence[Observation], tested: Sequence[Observation]) -> Estimate:
    """The usual method: all features to the total; p95 from the errors on its own training data."""
    trees = RandomForestRegressor(100, random_state=0).fit(_flat(fitted), total_ms(fitted))
    high = np.quantile(total_ms(fitted) / trees.predict(_flat(fitted)), 0.95)
    middle = trees.predict(_flat(tested))
    return {}, middle, middle * high


def other_machine_estimator(fitted: Sequence[Observation], tested: Sequence[Observation]) -> Estimate:
    return _estimate(LatencyEstimator.fit([_elsewhere(one) for one in fitted], model="mosaic"), tested)


def recalibrated_estimator(fitted: Sequence[Observation], tested: Sequence[Observation]) -> Estimate:
    there = LatencyEstimator.fit([_elsewhere(one) for one in fitted], model="mosaic")
    few = random.Random(11).sample(list(fitted), min(100, len(fitted)))
    return _estimate(there.recalibrate(few), tested)


def _estimate(fitted: LatencyEstimator, tested: Sequence[Observation]) -> Estimate:
    rows = fitted.predict_rows(feature_columns(tested))
    return dict(rows.stages_ms), rows.total_ms, rows.upper_ms


def _flat(seen: Sequence[Observation]) -> np.ndarray:
    return np.stack([column for part in feature_columns(seen).values() for column in part.values()], axis=1)


def estimate_all(method: Method, folds: Folds, seen: Sequence[Observation]) -> Estimate:
    """Every observation, estimated by a fit that has not seen it."""
    stages = {stage: np.zeros(len(seen)) for stage in STAGES}
    middle, high = np.zeros(len(seen)), np.zeros(len(seen))
    for fitted, tested in folds(seen):
        by_stage, middle[tested], high[tested] = method(list(compress(seen, fitted)), list(compress(seen, tested)))
        for stage, times in by_stage.items():
            stages[stage][tested] = times
    return stages, middle, high


def repeats_ms(seen: Sequence[Observation]) -> np.ndarray:
    """For every observation, the median total over all measurements of the same work on the same sample."""
    totals: dict[str, list[float]] = {}
    for one in seen:
        totals.setdefault(one.configuration, []).append(one.measured.total_ms)
    return np.array([np.median(totals[one.configuration]) for one in seen])


def slowdown(ratios: np.ndarray, reach: int = 10) -> np.ndarray:
    """How slow the machine was around each measurement: the median ratio of its neighbours, in any setting."""
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
    prompt_tokens = {tier: prompt_length(executor.adapter, sample, tier) for tier in executor.options.crops_by_tier}
    times = []
    for _ in range(50):
        begun = time.perf_counter()
        rows = asked.rows(prompt_tokens)
        times.append(1000 * (time.perf_counter() - begun))
    return len(rows), float(np.median(times))


METHODS: dict[str, tuple[Method, Folds]] = {
    "estimator, held-out configurations + samples": (estimator, by_configuration_and_sample),
    "one forest, split by row (usually reported)": (forest, by_row),
    "one forest, held out": (forest, by_configuration_and_sample),
    "estimator of another machine, unchanged": (other_machine_estimator, by_configuration_and_sample),
    "  recalibrated from 100 measurements": (recalibrated_estimator, by_configuration_and_sample),
}


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--seconds", type=float, default=90.0)
    flags.add_argument("--new-tokens", type=int, default=4)
    flags.add_argument("--cpu-time", action="store_true", help="CPU time of this process, for a busy machine")
    given = flags.parse_args()
    clock = "cpu" if given.cpu_time else "wall"
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
    print(f"                                             {'answers':>10} {'repeats':>10} {'slowdowns':>13} below p95")
    measured = total_ms(seen)
    print(f"{'noise of the clock':44} {error(repeats_ms(seen), measured):11.1%}")
    for name, (method, folds) in METHODS.items():
        _, middle, high = estimate_all(method, folds, seen)
        steady = error(middle * slowdown(measured / middle), measured)
        metrics = f"{error(middle, measured):11.1%} {error(middle, repeats_ms(seen)):10.1%} {steady:13.1%}"
        print(f"{name:44} {metrics} {(measured <= high).mean():9.1%}")
    stages, _, _ = estimate_all(estimator, by_configuration_and_sample, seen)
    for stage in STAGES:
        times = stage_ms(seen, stage)
        there = times > 0
        slow = slowdown(times[there] / stages[stage][there])
        metrics = f"{error(stages[stage][there], times[there]):11.1%} {'':10}"
        steady = error(stages[stage][there] * slow, times[there])
        print(f"{f'  {stage}, median {np.median(times[there]):.2f} ms':44} {metrics} {steady:13.1%}")
    count, took = predict_ms(executor, seen, samples[0], given.new_tokens)
    print(f"estimating all {count} settings of a sample takes {took:.2f} ms")


if __name__ == "__main__":
    main()
