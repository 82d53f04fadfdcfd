"""Coefficients by hand, estimates that grow with the work, and quantiles that hold on held-out answers."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import ENVIRONMENT

from groupwise.core.errors import UserError
from groupwise.latency.estimator import LatencyEstimator, conformal_quantile, cross_folds
from groupwise.latency.machine import Machine
from groupwise.latency.records import DECODE, PREFILL, VISION, EstimatedLatency, MeasuredLatency
from groupwise.latency.regression import Observation, feature_columns, nonnegative_median_regression, total_ms

HERE = Machine("one core", 2, 1, "2.13", "cpu")


def features(crops, blocks, top_k, tokens=30.0, steps=2.0):
    return {
        VISION: {"crops": float(crops)},
        PREFILL: {"blocks": float(blocks), "expert_pairs": float(blocks * top_k * tokens)},
        DECODE: {"steps": steps, "block_steps": steps * blocks},
    }


def true_stages(part, factors=(1.0, 1.0, 1.0), constants=(0.0, 0.0, 0.0)):
    exact = {
        VISION: 3 + 0.5 * part[VISION]["crops"],
        PREFILL: 1 + 0.8 * part[PREFILL]["blocks"] + 0.002 * part[PREFILL]["expert_pairs"],
        DECODE: 0.4 * part[DECODE]["steps"] + 0.3 * part[DECODE]["block_steps"],
    }
    return {
        stage: factor * exact[stage] + constant
        for stage, factor, constant in zip(exact, factors, constants, strict=True)
    }


def measure(count, *, noise=0.0, seed=0, factors=(1.0, 1.0, 1.0), constants=(0.0, 0.0, 0.0)):
    """Answers of a machine whose coefficients are known, with multiplicative noise and some slow outliers."""
    rng, seen = np.random.default_rng(seed), []
    for _ in range(count):
        crops, blocks, top_k = int(rng.choice([4, 7, 13])), int(rng.integers(12, 17)), int(rng.integers(4, 9))
        sample, steps = int(rng.integers(20)), float(rng.integers(0, 4))
        part = features(crops, blocks, top_k, tokens=9 * crops + 2 + sample % 3, steps=steps)
        slow = 2.5 if noise and rng.random() < 0.03 else 1.0
        stages = {
            stage: time * slow * float(np.exp(noise * rng.standard_normal()))
            for stage, time in true_stages(part, factors, constants).items()
        }
        name = f"{crops} crops, {blocks} blocks, top-{top_k}"
        seen.append(Observation(name, f"sample {sample}", part, MeasuredLatency(stages, sum(stages.values()))))
    return seen


def predict(estimator, part):
    """One answer: the only row."""
    columns = {stage: {name: np.array([value]) for name, value in by_name.items()} for stage, by_name in part.items()}
    return estimator.predict_rows(columns)[0]


def errors(estimator, seen):
    return np.abs(estimator.predict_rows(feature_columns(seen)).total_ms / total_ms(seen) - 1)


@pytest.fixture(scope="module")
def fitted():
    return LatencyEstimator.fit(measure(600, noise=0.05), model="tiny", machine=HERE)


def test_coefficients_by_hand():
    # 2 ms a crop and 3 ms a block, exactly: 1 crop and 1 block take 5 ms, 2 and 1 take 7, 1 and 2 take 8.
    work = np.array([[1.0, 1.0], [2.0, 1.0], [1.0, 2.0]])
    assert nonnegative_median_regression(work, np.array([5.0, 7.0, 8.0]), np.ones(3)) == pytest.approx([2, 3])
    # The median of 1, 2 and 90 is 2: an outlier pulls no harder than the rest. A coefficient is never negative.
    assert nonnegative_median_regression(np.ones((3, 1)), np.array([1.0, 2.0, 90.0]), np.ones(3)) == pytest.approx(
        [2], abs=1e-3
    )
    assert nonnegative_median_regression(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([2.0, 1.0]), np.ones(2))[1] == 0


def test_exact_times_give_exact_coefficients_and_an_estimate_by_hand():
    estimator = LatencyEstimator.fit(measure(200), model="tiny", machine=HERE)
    assert estimator.coefficients[VISION] == pytest.approx({"crops": 0.5, "intercept": 3})
    assert estimator.coefficients[PREFILL] == pytest.approx({"blocks": 0.8, "expert_pairs": 0.002, "intercept": 1})
    assert estimator.coefficients[DECODE] == pytest.approx({"steps": 0.4, "block_steps": 0.3, "intercept": 0}, abs=1e-9)
    # 3 + 0.5 x 7 = 6.5; 1 + 0.8 x 10 + 0.002 x 10 x 5 x 30 = 12; 0.4 x 2 + 0.3 x 20 = 6.8
    one = predict(estimator, features(7, 10, 5))
    assert isinstance(one, EstimatedLatency)
    assert not isinstance(one, MeasuredLatency)
    assert one.stages_ms == pytest.approx({VISION: 6.5, PREFILL: 12, DECODE: 6.8})
    assert (one.total_ms, one.upper_ms, one.quantile) == pytest.approx((25.3, 25.3, 0.95))


work = st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 16), st.integers(1, 500), st.integers(0, 9))


@given(work, work)
def test_more_work_is_never_estimated_to_take_less(fitted, one, other):
    less, more = (
        predict(fitted, features(*(pick(pair) for pair in zip(one, other, strict=True)))) for pick in (min, max)
    )
    assert less.total_ms <= more.total_ms
    assert less.upper_ms <= more.upper_ms
    assert all(less.stages_ms[stage] <= more.stages_ms[stage] for stage in less.stages_ms)
    assert more.total_ms < more.upper_ms


@given(st.lists(work, min_size=1, max_size=9))
def test_many_rows_at_once_are_each_row_alone(fitted, rows):
    columns = {
        stage: {name: np.array([features(*row)[stage][name] for row in rows]) for name in part}
        for stage, part in features(*rows[0]).items()
    }
    together = fitted.predict_rows(columns)
    assert [together[row] for row in range(len(together))] == [predict(fitted, features(*row)) for row in rows]


@pytest.mark.parametrize("seed", range(3))
def test_held_out_configurations_and_samples_stay_under_the_quantile(seed):
    seen = measure(500, noise=0.08, seed=seed)
    fit_on, tested = next(iter(cross_folds(seen, 2)))
    estimator = LatencyEstimator.fit(
        [one for one, there in zip(seen, fit_on, strict=True) if there], model="m", machine=HERE
    )
    new = measure(1500, noise=0.08, seed=seed + 1)
    for quantile in (0.5, 0.9, 0.95):
        high = estimator.with_quantile(quantile).predict_rows(feature_columns(new)).upper_ms
        # About 125 ratios: the coverage itself strays by sqrt(q (1 - q) / 125), 0.02 to 0.045.
        assert abs((total_ms(new) <= high).mean() - quantile) < 4 * (quantile * (1 - quantile) / 125) ** 0.5
    held_out = [one for one, there in zip(seen, tested, strict=True) if there]
    assert np.median(errors(estimator, held_out)) < 0.1


def test_the_quantile_of_sorted_ratios_by_hand():
    # 19 ratios: the ceil(20 x 0.95) = 19th. 18 cannot tell: ceil(19 x 0.95) is beyond them.
    assert conformal_quantile(np.arange(1.0, 20.0), 0.95) == 19
    assert conformal_quantile(np.arange(1.0, 20.0), 0.5) == 10
    with pytest.raises(UserError, match=r"18 observations are too few for a quantile of 0.95: it takes at least 19"):
        conformal_quantile(np.arange(1.0, 19.0), 0.95)
    with pytest.raises(UserError, match=r"quantile is 1.0: it must be from 0.5 to below 1"):
        conformal_quantile(np.ones(9), 1.0)


def test_no_configuration_and_no_sample_is_on_both_sides_and_each_observation_is_tested_once():
    seen = measure(300)
    times_tested = np.zeros(len(seen), int)
    for fit_on, tested in cross_folds(seen):
        for name in ("configuration", "sample"):
            sides = [{getattr(seen[row], name) for row in np.flatnonzero(side)} for side in (fit_on, tested)]
            assert not sides[0] & sides[1]
        times_tested += tested
    assert (times_tested == 1).all()


def test_saved_and_loaded_is_bit_equal(fitted, tmp_path):
    path = tmp_path / "new folder" / "estimator.json"
    fitted.save(path)
    loaded = LatencyEstimator.load(path, model="tiny", machine=HERE)
    assert loaded.ratios.tobytes() == fitted.ratios.tobytes()
    assert replace(loaded, ratios=0) == replace(fitted, ratios=0)
    assert predict(loaded, features(7, 14, 6)) == predict(fitted, features(7, 14, 6))
    assert [file.name for file in path.parent.iterdir()] == ["estimator.json"]


def test_the_share_of_cpu_time_is_kept_and_a_file_without_one_is_read(fitted, tmp_path):
    path = tmp_path / "estimator.json"
    fitted.save(path)
    assert "cpu_share" not in json.loads(path.read_text())
    assert not LatencyEstimator.load(path, model="tiny", machine=HERE).was_busy
    seen = [replace(one, measured=replace(one.measured, cpu_ms=0.5 * one.measured.total_ms)) for one in measure(100)]
    for busy in (LatencyEstimator.fit(seen, model="tiny", machine=HERE), fitted.recalibrate(seen, machine=HERE)):
        busy.save(path)
        loaded = LatencyEstimator.load(path, model="tiny", machine=HERE)
        assert loaded.was_busy
        assert loaded.cpu_share == pytest.approx(0.5)


def test_another_machine_or_model_is_refused_unless_mismatches_are_allowed(fitted, tmp_path):
    path = tmp_path / "estimator.json"
    fitted.save(path)
    with pytest.raises(UserError, match=r"fitted for model tiny, not large\. Profile here .* recalibrate"):
        LatencyEstimator.load(path, model="large", machine=HERE)
    with pytest.raises(UserError, match=r"fitted for cpu one core, not .* allow_mismatch=True"):
        LatencyEstimator.load(path, model="tiny")
    other = replace(HERE, threads=8)
    loaded = LatencyEstimator.load(path, model="large", machine=other, allow_mismatch=True)
    assert loaded.mismatches == {"threads": "1, not 8", "model": "tiny, not large"}
    assert predict(loaded, features(7, 14, 6)) == predict(fitted, features(7, 14, 6))
    loaded.save(path)
    assert LatencyEstimator.load(path, model="tiny", machine=HERE).mismatches == {}
    # Recalibration corrects for the machine, not for the model.
    recalibrated = loaded.recalibrate(measure(100, noise=0.05), machine=other)
    assert (recalibrated.machine, recalibrated.mismatches) == (other, {"model": "tiny, not large"})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "There is no estimator in"),
        ('{"format": "groupwise', "is damaged"),
        ("[1, 2]", "does not hold a groupwise latency estimator"),
        (json.dumps({"format": "groupwise latency estimator 2"}), "does not hold a groupwise latency estimator"),
    ],
)
def test_a_file_without_an_estimator_is_refused(tmp_path, content, says):
    path = tmp_path / "estimator.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=says):
        LatencyEstimator.load(path, model="tiny")


@pytest.mark.parametrize("seed", range(3))
def test_100_measurements_recalibrate_for_another_machine(fitted, seed):
    # Vision twice as slow, prefill 0.6 times with 4 ms on top, decode 1.7 times.
    there = {"factors": (2.0, 0.6, 1.7), "constants": (0.0, 4.0, 0.0), "noise": 0.05}
    new = measure(2000, seed=100 + seed, **there)
    assert np.median(errors(fitted, new)) > 0.13
    recalibrated = fitted.recalibrate(measure(100, seed=seed, **there), machine=replace(HERE, cpu="another"))
    assert np.median(errors(recalibrated, new)) < 0.1
    assert 0.9 <= (total_ms(new) <= recalibrated.predict_rows(feature_columns(new)).upper_ms).mean() <= 0.99
    # 3 + 0.5 x 7 = 6.5 before, 13 there.
    assert predict(recalibrated, features(7, 14, 6)).stages_ms[VISION] == pytest.approx(13, rel=0.1)


def test_an_estimator_is_calibrated_until_too_many_answers_exceed_it():
    exact = LatencyEstimator.fit(measure(200), model="tiny", machine=HERE)
    exact = replace(exact, ratios=np.linspace(0.8, 1.2, 401))  # one in twenty below 0.82, one in twenty above 1.18
    same = measure(40)
    assert exact.slowdown(same) == pytest.approx(1, abs=1e-6)
    assert exact.slowdown(measure(40, factors=(1.5,) * 3)) == pytest.approx(1.5, abs=1e-6)

    def is_calibrated(slow, factor):
        """40 answers, some of which are slow."""
        return exact.is_calibrated([*measure(slow, factors=(factor,) * 3), *same[slow:]])

    assert [is_calibrated(slow, 1.25) for slow in (0, 6, 7)] == [True, True, False]
    assert [is_calibrated(40, factor) for factor in (0.5, 1.17, 1.25)] == [True, True, False]


def test_bad_observations_are_refused(fitted):
    seen = measure(100)
    with pytest.raises(UserError, match="There are no observations"):
        LatencyEstimator.fit([], model="tiny")
    with pytest.raises(UserError, match="All observations share one sample, 'a'"):
        LatencyEstimator.fit([replace(one, sample="a") for one in seen], model="tiny")
    with pytest.raises(UserError, match=r"10 observations are too few for a quantile of 0.95"):
        LatencyEstimator.fit(seen[:10], model="tiny")
    broken = replace(seen[3], measured=MeasuredLatency(dict.fromkeys(seen[3].measured.stages_ms, 1.0), float("nan")))
    with pytest.raises(UserError, match="negative or not finite"):
        LatencyEstimator.fit([*seen, broken], model="tiny")
    with pytest.raises(UserError, match="has other features than the first one"):
        LatencyEstimator.fit([*seen, replace(seen[0], features={VISION: {}})], model="tiny")
    with pytest.raises(UserError, match=r"fitted with the features vision.crops, .* was given vision.crops"):
        predict(fitted, {VISION: {"crops": 1.0}})


def test_a_coefficient_without_observations_is_not_guessed():
    without = [
        replace(one, features=features(4 + n % 9, 12 + n % 5, 4, steps=0.0)) for n, one in enumerate(measure(200))
    ]
    estimator = LatencyEstimator.fit(without, model="tiny", machine=HERE)
    predict(estimator, features(4, 12, 4, steps=0.0))
    with pytest.raises(UserError, match=r"decode.steps, decode.block_steps was 0 in all observations"):
        predict(estimator, features(4, 12, 4, steps=1.0))


def test_a_file_has_the_same_bytes_in_every_process(tmp_path):
    """Checkpoints compare them: the order of fields must not depend on a process's hash seed."""
    program = (
        "import sys; from pathlib import Path;"
        "from tiny.estimator import fixed_estimator; from tiny.llava import llava_olmoe;"
        "fixed_estimator(llava_olmoe()).save(Path(sys.argv[1]))"
    )
    for seed in ("1", "2"):
        environment = {**ENVIRONMENT, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", program, tmp_path / f"{seed}.json"], env=environment, check=True)
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()
