"""pass@k: by hand, as a property, and against counting all subsets."""

from itertools import combinations
from math import isclose

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.errors import UserError
from groupwise.workloads.chat.evaluate import mean_pass_at, pass_at


def test_pass_at_by_hand():
    # 4 samples, 1 passed: of the 6 pairs, 3 hold it
    assert pass_at(2, samples=4, passed=1) == 0.5
    assert pass_at(1, samples=4, passed=1) == 0.25
    assert pass_at(4, samples=4, passed=1) == 1
    assert pass_at(3, samples=4, passed=0) == 0
    assert mean_pass_at(2, samples=4, passed=[1, 0]) == (0.25, 0.25)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_is_the_fraction_of_subsets_with_a_passed_sample(case):
    samples, passed, k = case
    subsets = list(combinations(range(samples), k))
    fraction = sum(any(number < passed for number in subset) for subset in subsets) / len(subsets)
    assert isclose(pass_at(k, samples=samples, passed=passed), fraction, abs_tol=1e-12)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_pass_at_rises_with_k_and_is_the_passed_fraction_at_1(case):
    samples, passed = case
    values = [pass_at(k, samples=samples, passed=passed) for k in range(1, samples + 1)]
    assert values == sorted(values)
    assert isclose(values[0], passed / samples)


def test_pass_at_has_no_bias_where_the_plain_estimate_has():
    """Samples that pass with probability p: the mean is 1 - (1 - p)^k."""
    probability, samples, k = 0.2, 8, 4
    passed_counts = (
        (torch.rand(4000, samples, generator=torch.Generator().manual_seed(0)) < probability).sum(1).tolist()
    )
    truth = 1 - (1 - probability) ** k
    mean, error = mean_pass_at(k, samples=samples, passed=passed_counts)
    plain = sum(1 - (1 - passed / samples) ** k for passed in passed_counts) / len(passed_counts)
    assert abs(mean - truth) < 4 * error
    assert plain < truth - 4 * error


def test_k_beyond_the_samples_is_refused():
    with pytest.raises(UserError, match="k of pass@k is 5: it must be from 1 to the 4 samples"):
        pass_at(5, samples=4, passed=1)
