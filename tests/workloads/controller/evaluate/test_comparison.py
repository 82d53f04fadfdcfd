"""Gains with intervals over pictures, and accuracy at equal latency, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from groupwise.workloads.controller.evaluate.comparison import (
    Curve,
    LatencyOnTestQuestions,
    PictureBootstrap,
    at_equal_latency,
    choices_under_limits,
    gain,
    rising_limits,
)
from groupwise.workloads.controller.evaluate.exact import EvaluationSet
from workloads.controller.evaluate.tiny_sets import evaluation_set


def test_questions_about_one_picture_are_drawn_together():
    """Two pictures, one all right and one all wrong: a draw has the first 0, 1 or 2 times, so the mean is 0, a half or
    1, however many questions there are. Taken for independent, 200 questions would give a narrow interval."""
    values = torch.tensor([1.0] * 100 + [0.0] * 100, dtype=torch.float64)
    assert PictureBootstrap(["first"] * 100 + ["second"] * 100).interval(values) == [0.0, 1.0]
    low, high = PictureBootstrap([str(index) for index in range(200)]).interval(values)
    assert 0.42 < low < 0.45
    assert 0.55 < high < 0.58


def test_the_interval_is_that_of_the_mean_over_pictures():
    # 400 pictures of two questions that always agree: the standard error is that of 400, 0.5 / 20.
    values = torch.from_numpy(np.random.default_rng(0).integers(0, 2, 400).repeat(2).astype(float))
    low, high = PictureBootstrap([str(index // 2) for index in range(800)]).interval(values)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.1)
    assert (low + high) / 2 == pytest.approx(float(values.mean()), abs=0.005)


def test_a_gain_is_a_mean_difference_over_questions_that_have_one():
    nan = float("nan")
    controller = torch.tensor([[1.0, 1.0], [0.0, 1.0], [nan, nan]], dtype=torch.float64)
    other = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    found = gain(controller, other, ["a", "b", "c"])
    assert found["mean"] == 0.5  # 1, 0; 0, 1; left out
    assert found["by_budget"] == [0.5, 0.5]
    assert found["interval"] == [0.5, 0.5]  # either picture alone has the same mean
    assert found["intervals_by_budget"] == [[0.0, 1.0], [0.0, 1.0]]


def curve(accuracy, latency_ms):
    return Curve(torch.tensor(accuracy, dtype=torch.float64), torch.tensor(latency_ms, dtype=torch.float64))


def test_accuracy_between_two_limits_is_interpolated_and_the_slower_and_worse_one_passed_over():
    # Two questions under three limits of 10, 20 and 30 ms with accuracy 0, 1/2, 1.
    three = curve([[0, 0, 1], [0, 1, 1]], [[10, 20, 30], [10, 20, 30]])
    assert three.accuracy_at(20, "p50").tolist() == [0, 1]
    assert three.accuracy_at(25, "p50").tolist() == [0.5, 1]
    assert three.accuracy_at(5, "p50").tolist() == [0, 0]
    assert three.accuracy_at(99, "p50").tolist() == [1, 1]
    # 15 ms with accuracy 1/2 is faster than 20 ms and as good; 40 ms with 0 is useless.
    more = curve([[0, 0, 1, 1, 0], [0, 1, 0, 1, 0]], [[10, 20, 15, 30, 40]] * 2)
    assert more.accuracy_at(15, "p50").tolist() == [1, 0]
    assert more.accuracy_at(22.5, "p50").tolist() == [1, 0.5]
    assert more.accuracy_at(99, "p50").tolist() == [1, 1]


def test_the_lead_at_equal_latency_by_hand():
    # The controller is right on all at 15 ms and 30 ms. The other one reaches 1/2 between 10 and 20 ms, and 1 at 30.
    controller = curve([[1, 1], [1, 1]], [[15, 30], [15, 30]])
    other = curve([[0, 0, 1], [0, 1, 1]], [[10, 20, 30], [10, 20, 30]])
    rows = at_equal_latency(controller, {"lookup": other}, ["a", "b"], "p50")
    assert rows["controller"] == {"latency_ms": [15, 30], "accuracy": [1, 1]}
    assert rows["lookup"]["accuracy"] == [0.25, 1]
    assert rows["lookup"]["mean"] == pytest.approx(0.375)  # 3/4 and 0
    # The first question is ahead by 1 and 0, the second by 1/2 and 0: draws of either picture alone.
    assert rows["lookup"]["interval"] == [0.25, 0.5]


def test_latency_of_all_questions_is_estimate_times_pace_plus_own_time():
    test_set = evaluation_set("ab", [[1, 0, 0, 0], [0, 1, 0, 0]])
    drawn = LatencyOnTestQuestions(test_set, [1.5]).curve(torch.tensor([[0, 1], [1, 3]]), own_ms=0.25)
    # Medians 1, 2; 2, 4 ms
    assert_close(drawn.latency_ms, torch.tensor([[1.75, 3.25], [3.25, 6.25]], dtype=torch.float64))
    assert drawn.accuracy.tolist() == [[1, 0], [1, 0]]


def test_limits_rise_from_the_cheapest_to_the_full_configuration():
    plain = evaluation_set("ab", [[0, 1, 1, 1], [0, 1, 1, 1]])
    tables = plain.upper_ms[:1].view(1, 1, 1, 1, 4)
    conditions = SimpleNamespace(
        questions=plain.questions, upper_ms=tables, table_index=torch.zeros(2, dtype=torch.int64)
    )
    test_set = EvaluationSet(conditions, plain.candidates, plain.accuracy, plain.median_ms, plain.upper_ms)
    limits = rising_limits(test_set)
    assert limits[0, [0, 12, 24]].tolist() == pytest.approx([1.1, 2.75, 4.4])
    chosen = choices_under_limits(test_set.median_ms, test_set, extra_ms=0.0)
    assert chosen[0, [0, 12, 24]].tolist() == [0, 1, 3]
    assert (chosen.diff(dim=1) >= 0).all()
