"""The pace follows the machine both ways, and the promised share of answers stays below its bound."""

from functools import reduce
from math import exp, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.latency.pace import BatchPaces, Pace

MEDIAN_MS, UPPER_MS = 100.0, 112.0


def follow(pace, measured_ms):
    return pace.after(measured_ms, median_ms=MEDIAN_MS, upper_ms=UPPER_MS, quantile=0.95)


def test_one_answer_by_hand():
    # 121 ms: late by 112. The slowdown goes a fifth of the way, 1.21^0.2; the bound also rises by 0.04 x 0.95 in logs.
    late = follow(Pace(), 121.0)
    assert late.slowdown == pytest.approx(1.21**0.2)
    assert late.upper_ratio == pytest.approx(1.21**0.2 * exp(0.038))
    assert late.answers == 1
    assert late.deviation == pytest.approx(0.05 * log(1.21))
    # 100 ms: on time and as estimated, so only the bound falls, by 0.04 x 0.05.
    assert follow(Pace(), 100.0) == Pace(1.0, exp(-0.002), 1, 0.0)
    # 1000 ms: a stall counts as an answer that is slower by e^0.5.
    assert follow(Pace(), 1000.0).slowdown == pytest.approx(exp(0.1))
    # Where answers vary by a factor of e^0.3 the bound moves by 0.3 x 0.95 after a late one.
    assert follow(Pace(deviation=0.3), 121.0).upper_ratio == pytest.approx(1.21**0.2 * exp(0.285))


def in_time(ratios, pace=None):
    """Whether each answer was within the bound it was promised; a static promise without a pace."""
    kept = []
    for ratio in ratios:
        current = pace or Pace()
        kept.append(ratio * MEDIAN_MS <= current.upper_ratio * UPPER_MS)
        pace = follow(current, ratio * MEDIAN_MS) if pace else None
    return np.array(kept)


@pytest.mark.parametrize("noise", ["normal", "heavy", "correlated", "stalls", "long stalls"])
def test_the_promised_share_holds_while_the_speed_changes(noise):
    """1.5 times slower in the second third, as fast as before in the last: a static promise breaks."""
    rng = np.random.default_rng(1)
    errors = {
        "normal": 0.06 * rng.standard_normal(900),
        "heavy": 0.04 * rng.standard_t(3, 900),
        "correlated": np.array(reduce(lambda e, new: [*e, 0.8 * e[-1] + new], 0.04 * rng.standard_normal(899), [0.0])),
        "stalls": 0.05 * rng.standard_normal(900) + 0.7 * (rng.random(900) < 0.03),
        "long stalls": 0.05 * rng.standard_normal(900) + 2.2 * (rng.random(900) < 0.1),
    }[noise]
    ratios = np.exp(errors) * np.repeat([1.0, 1.5, 1.0], 300)
    assert abs(in_time(ratios, Pace()).mean() - 0.95) < 0.02
    assert in_time(ratios).mean() < 0.7 < in_time(ratios, Pace())[300:600].mean()


def test_a_faster_machine_is_used():
    pace = reduce(follow, [60.0] * 40, Pace())
    assert pace.slowdown == pytest.approx(0.6, rel=1e-3)
    assert pace.upper_ratio < 0.6


@settings(max_examples=25)
@given(st.lists(st.floats(0.2, 5.0), min_size=3, max_size=60))
def test_the_promised_share_holds_for_any_answers_that_keep_coming(ratios):
    assert abs(in_time(ratios * (4000 // len(ratios)), Pace()).mean() - 0.95) < 0.02


def test_a_batch_starts_without_sharing_and_learns_its_own_pace():
    paces = BatchPaces()
    paces.set(1, Pace(1.3, 1.4, 9))
    assert paces.of(1) == Pace(1.3, 1.4, 9)
    assert paces.of(40) == Pace(1.3, 1.4, 0)
    paces.set(40, Pace(0.5, 0.6, 1))
    assert paces.of(33) == paces.of(63) == Pace(0.5, 0.6, 1)
    assert paces.of(64) == paces.of(31) == Pace(1.3, 1.4, 0)
