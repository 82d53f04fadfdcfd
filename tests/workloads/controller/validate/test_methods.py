"""Baselines and ceilings on a table small enough to fill in by hand."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.workloads.controller.evaluate import baselines as methods
from groupwise.workloads.controller.evaluate.exact import EvaluationSet

MEDIAN_MS = torch.tensor([1.0, 2.0, 3.0, 4.0])


def exam(kinds, accuracy, budgets=(2.5, 9.0), high=1.1):
    """Four configurations of 1 to 4 ms; every question has the same budgets."""
    questions = [SimpleNamespace(kind=kind) for kind in kinds]
    conditions = SimpleNamespace(questions=questions, budget_ms=torch.tensor(budgets).repeat(len(kinds)))
    medians = MEDIAN_MS.expand(len(kinds), -1)
    return EvaluationSet(conditions, torch.tensor(accuracy, dtype=torch.float64), medians, high * medians)


CHOOSE = exam("aab", [[1, 0, 0, 0], [1, 0, 1, 1], [0, 1, 1, 0]])
TEST = exam("abc", [[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])


def test_one_configuration_a_budget_by_hand():
    # right on choose: 2/3, 1/3, 2/3, 1/3. Under 2.5 ms 0 and 1 fit; under 9 all do, and of two equals the faster wins.
    assert methods.lookup(CHOOSE, TEST).tolist() == [[0, 0]] * 3
    better = exam("aab", [[1, 0, 1, 0], [1, 0, 1, 1], [0, 1, 1, 0]])
    assert methods.lookup(better, TEST).tolist() == [[0, 2]] * 3
    assert methods.lookup(exam("a", [[0, 0, 1, 0]], high=1.3), TEST).tolist() == [[0, 2]] * 3


def test_what_does_not_fit_every_question_is_in_no_table():
    tight = exam("aa", [[0, 1, 0, 0], [0, 1, 0, 0]], budgets=(2.5, 9.0))
    tight.upper_ms[1, 1] = 2.6
    assert methods.lookup(tight, TEST)[0].tolist() == [0, 1]
    assert methods.lookup(exam("a", [[0, 0, 0, 1]], budgets=(0.5, 0.6)), TEST)[0].tolist() == [0, 0]


def test_one_configuration_a_kind_by_hand():
    # kind a: 0 is right twice. Kind b: 1 and 2 are right; under 9 ms the better one over all kinds is 2. Kind c is new.
    assert methods.kind_oracle(CHOOSE, TEST).tolist() == [[0, 0], [1, 2], [0, 0]]


def test_the_oracle_takes_the_fastest_that_is_right():
    assert methods.oracle(TEST).tolist() == [[1, 1], [0, 0], [0, 0]]
    assert TEST.score(methods.oracle(TEST)).tolist() == [[1, 1], [1, 1], [0, 0]]


def test_by_cost():
    assert methods.dearest(TEST).tolist() == [[1, 3]] * 3
    assert methods.cheapest(TEST).tolist() == [[0, 0]] * 3


def test_numbers_of_configurations_and_options_are_each_others_inverse():
    numbers, shape = torch.arange(3 * 5 * 2 * 4), (3, 5, 2, 4)
    choices = methods.choices_of(numbers, shape)
    assert torch.equal(choices, torch.cartesian_prod(*(torch.arange(size) for size in shape)))
    assert torch.equal(methods.numbers_of(choices, shape), numbers)


right = st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=6, max_size=6)


@given(right, st.lists(st.floats(0.5, 6), min_size=2, max_size=2), st.integers(0, 99))
def test_nobody_does_better_than_the_oracle_and_all_fit(accuracy, budgets, seed):
    asked = exam("ababab", accuracy, tuple(budgets))
    best = asked.score(methods.oracle(asked))
    for chosen in (
        methods.lookup(asked, asked),
        methods.kind_oracle(asked, asked),
        methods.random_choice(asked, seed),
        methods.dearest(asked),
        methods.cheapest(asked),
    ):
        assert (asked.score(chosen) <= best).all()
        assert asked.fitting.gather(2, chosen[..., None]).all()
    by_kind, by_budget = (asked.score(method(asked, asked)).mean(0) for method in (methods.kind_oracle, methods.lookup))
    assert (by_kind >= by_budget).all()  # on what they were chosen on
