"""Shares and gaps by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from groupwise.workloads.controller.evaluate.metrics import gap_closed, gap_interval, interval_too_wide, wilson


def test_gap_closed_by_hand():
    assert gap_closed(0.80, 0.86, 0.88) == pytest.approx(0.75)
    assert gap_closed(0.80, 0.78, 0.90) == pytest.approx(-0.2)
    assert gap_closed(0.80, 0.86, 0.80) is None


def test_wilson_by_hand():
    # none of 100 at z = 2: centre and reach are both (4 / 100 / 2) / (1 + 4 / 100)
    assert wilson(0, 100, z=2) == pytest.approx((0, 0.04 / 1.04))
    assert wilson(0, 0) == (0, 1)


@given(st.integers(1, 300).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials))))
def test_wilson_is_scipys(counted):
    reference = binomtest(*counted).proportion_ci(method="wilson")
    assert wilson(*counted) == pytest.approx((reference.low, reference.high), abs=1e-6)


def test_the_interval_draws_images_not_questions():
    floor, ceiling = torch.zeros(400), torch.ones(400)
    reached = (torch.arange(400) % 2).double()
    alone = gap_interval(floor, reached, ceiling, [str(nth) for nth in range(400)])
    together = gap_interval(floor, reached, ceiling, [str(nth % 4) for nth in range(400)])
    # 400 independent halves: 0.5 +- 2 x 0.025; four images of which two are right: from none to all of them
    assert alone == pytest.approx((0.45, 0.55), abs=0.01)
    assert together[0] == 0
    assert together[1] == 1
    assert gap_interval(floor, reached, floor, ["a"] * 400) is None


def test_a_share_is_noise_when_its_interval_says_nothing():
    assert interval_too_wide(None)
    assert interval_too_wide((-4.0, 7.0))
    assert not interval_too_wide((0.6, 1.1))
