"""A stored estimator beside some answers: medians by hand, and what other programs take is not drift."""

from dataclasses import replace

import numpy as np
import pytest

from groupwise.latency.drift import TOLERANCE, SpeedCheck, within_tolerance
from groupwise.latency.estimator import LatencyEstimator
from groupwise.latency.machine import Machine
from groupwise.latency.records import PREFILL, MeasuredLatency
from groupwise.latency.regression import INTERCEPT, Observation

STORED = LatencyEstimator(
    {PREFILL: {"blocks": 2.0, INTERCEPT: 10.0}}, {}, np.ones(40), "tiny", Machine("cpu", 1, 1, "2", "cpu")
)


def seen(factor, share=None):
    """Answers of 0 to 4 blocks, estimated at 10, 12, 14, 16 and 18 ms; this many times as long, with so much CPU."""
    measured = [factor * (10 + 2 * blocks) for blocks in range(5)]
    return [
        Observation(
            f"{blocks}",
            "a",
            {PREFILL: {"blocks": blocks}},
            MeasuredLatency({PREFILL: ms}, ms, cpu_ms=None if share is None else share * ms),
        )
        for blocks, ms in enumerate(measured)
    ]


def test_medians_by_hand():
    checked = SpeedCheck.of(STORED, seen(3.0, share=0.5))
    assert (checked.answers, checked.estimated_ms, checked.measured_ms) == (5, 14, 42)
    assert (checked.slowdown, checked.undisturbed_slowdown, checked.cpu_share) == (3, 1.5, 0.5)
    assert str(checked) == (
        "estimated 14.0 ms, measured now 42.0 ms, 3.00 times as long (medians of 5 answers; they had the CPU for 50% of"
        " the time)"
    )
    assert str(SpeedCheck.of(STORED, seen(3.0))).endswith("(medians of 5 answers)")


@pytest.mark.parametrize(
    ("factor", "share", "drifted", "disturbed"),
    [
        (1.0, 1.0, False, False),
        (1.3, 1.0, False, False),
        (1 / 20, 1.0, True, False),  # stored 20 times too long
        (5.0, 1.0, True, False),  # stored a fifth of what it takes
        (3.0, 1 / 3, False, True),  # two others on this core
        (8.0, 1 / 4, False, True),  # which also take its cache
        (1.0, 0.05, True, False),  # stored 20 times too long, and as slow now because of others
        (15.0, 1 / 3, True, False),  # stored a fifth, and others run
        (5.0, None, True, False),  # an accelerator
        (1.2, None, False, False),
    ],
)
def test_another_speed_is_told_from_other_programs(factor, share, drifted, disturbed):
    checked = SpeedCheck.of(STORED, seen(factor, share))
    assert (checked.has_drifted, checked.is_disturbed) == (drifted, disturbed)


def test_threads_that_wait_for_each_other_on_a_busy_machine_tell_nothing():
    stored = replace(STORED, machine=replace(STORED.machine, threads=2))
    busy, quiet, faster = (SpeedCheck.of(stored, seen(*each)) for each in ((40.0, 0.2), (40.0, 1.0), (0.2, 0.2)))
    assert [each.has_drifted for each in (busy, quiet, faster)] == [False, True, True]
    assert busy.is_disturbed


def test_the_tolerance_is_the_same_both_ways():
    assert [within_tolerance(factor) for factor in (TOLERANCE, 1 / TOLERANCE, 1.51, 0.66)] == [True, True, False, False]
