"""Baselines and ceilings on a table small enough to fill in by hand."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.workloads.controller.evaluate import baselines
from groupwise.workloads.controller.evaluate.exact import EvaluationSet

MEDIAN_MS = torch.tensor([1.0, 2.0, 3.0, 4.0])


def evaluation_set(types, accuracy, budgets=(2.5, 9.0), upper=1.1):
    """Four configurations of 1 to 4 ms; every question has the same budgets."""
    questions = [SimpleNamespace(question_type=name) for name in types]
    conditions = SimpleNamespace(questions=questions, budget_ms=torch.tensor(budgets).repeat(len(types)))
    medians = MEDIAN_MS.expand(len(types), -1)
    return EvaluationSet(conditions, torch.tensor(accuracy, dtype=torch.float64), medians, upper * medians)


SELECTION = evaluation_set("aab", [[1, 0, 0, 0], [1, 0, 1, 1], [0, 1, 1, 0]])
TEST = evaluation_set("abc", [[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])


def test_one_configuration_per_budget_by_hand():
    # Accuracy on the selection set: 2/3, 1/3, 2/3, 1/3. Under 2.5 ms 0 and 1 fit; under 9 all do, and of two equals the
    # faster wins.
    assert baselines.lookup_table(SELECTION, TEST).tolist() == [[0, 0]] * 3
    better = evaluation_set("aab", [[1, 0, 1, 0], [1, 0, 1, 1], [0, 1, 1, 0]])
    assert baselines.lookup_table(better, TEST).tolist() == [[0, 2]] * 3
    assert baselines.lookup_table(evaluation_set("a", [[0, 0, 1, 0]], upper=1.3), TEST).tolist() == [[0, 2]] * 3


def test_what_does_not_fit_every_question_is_in_no_table():
    tight = evaluation_set("aa", [[0, 1, 0, 0], [0, 1, 0, 0]], budgets=(2.5, 9.0))
    tight.upper_ms[1, 1] = 2.6
    assert baselines.lookup_table(tight, TEST)[0].tolist() == [0, 1]
    assert baselines.lookup_table(evaluation_set("a", [[0, 0, 0, 1]], budgets=(0.5, 0.6)), TEST)[0].tolist() == [0, 0]


def test_one_configuration_per_question_type_by_hand():
    # Type a: 0 is right twice. Type b: 1 and 2 are right; under 9 ms the better one over all types is 2. Type c is new.
    assert baselines.question_type_oracle(SELECTION, TEST).tolist() == [[0, 0], [1, 2], [0, 0]]


def test_the_oracle_takes_the_fastest_that_is_right():
    assert baselines.per_question_oracle(TEST).tolist() == [[1, 1], [0, 0], [0, 0]]
    assert TEST.accuracy_of(baselines.per_question_oracle(TEST)).tolist() == [[1, 1], [1, 1], [0, 0]]


def test_slowest_feasible_and_cheapest():
    assert baselines.slowest_feasible(TEST).tolist() == [[1, 3]] * 3
    assert baselines.cheapest(TEST).tolist() == [[0, 0]] * 3


right = st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=6, max_size=6)


@given(right, st.lists(st.floats(0.5, 6), min_size=2, max_size=2), st.integers(0, 99))
def test_no_method_beats_the_per_question_oracle_and_all_are_feasible(accuracy, budgets, seed):
    questions = evaluation_set("ababab", accuracy, tuple(budgets))
    best = questions.accuracy_of(baselines.per_question_oracle(questions))
    for chosen in (
        baselines.lookup_table(questions, questions),
        baselines.question_type_oracle(questions, questions),
        baselines.random_feasible(questions, seed),
        baselines.slowest_feasible(questions),
        baselines.cheapest(questions),
    ):
        assert (questions.accuracy_of(chosen) <= best).all()
        assert questions.feasible.gather(2, chosen[..., None]).all()
    by_type, by_budget = (
        questions.accuracy_of(method(questions, questions)).mean(0)
        for method in (baselines.question_type_oracle, baselines.lookup_table)
    )
    assert (by_type >= by_budget).all()  # on the set they were chosen on
