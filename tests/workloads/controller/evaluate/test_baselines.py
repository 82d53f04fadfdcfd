"""Baselines and ceilings on a table small enough to fill in by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from groupwise.workloads.controller.evaluate import baselines
from workloads.controller.evaluate.tiny_sets import evaluation_set

SELECTION = evaluation_set("aab", [[1, 0, 0, 0], [1, 0, 1, 1], [0, 1, 1, 0]])
TEST = evaluation_set("abc", [[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])


def table(selection_set, test_set, group_of=baselines.no_group, extra_ms=0.0):
    return baselines.choose(baselines.table_scores(selection_set, test_set, group_of), test_set, extra_ms)


def test_one_configuration_per_budget_by_hand():
    # Accuracy on the selection set: 2/3, 1/3, 2/3, 1/3. Under 2.5 ms 0 and 1 fit; under 9 all do, and of two equals the
    # faster wins.
    assert table(SELECTION, TEST).tolist() == [[0, 0]] * 3
    better = evaluation_set("aab", [[1, 0, 1, 0], [1, 0, 1, 1], [0, 1, 1, 0]])
    assert table(better, TEST).tolist() == [[0, 2]] * 3


def test_each_question_gets_the_best_that_fits_it():
    # In the order of the selection set 1 is best, then 0 (faster of equals). On the second question 1 does not fit.
    tight = evaluation_set("aa", [[0, 1, 0, 0]] * 2)
    tight.upper_ms[1, 1] = 2.6
    assert table(evaluation_set("a", [[0, 1, 0, 0]]), tight).tolist() == [[1, 1], [0, 1]]
    assert table(SELECTION, evaluation_set("a", [[0, 0, 0, 1]], budgets=(0.5, 0.6)))[0].tolist() == [0, 0]


def test_a_method_is_charged_its_own_time_and_not_the_controllers():
    # Upper quantiles 1.1, 2.2, 3.3, 4.4, with 0.9 ms of a controller inside. Under 2.5 ms 0 and 1 fit.
    best_is_slow = evaluation_set("a", [[0, 0, 1, 1]])
    assert table(best_is_slow, TEST)[0].tolist() == [0, 2]
    # Without the controller's time the third takes 2.4 ms: a lookup table may use it.
    assert table(best_is_slow, TEST, extra_ms=-0.9)[0].tolist() == [2, 2]
    # A classifier that takes 0.2 ms of it may not: 2.6.
    assert table(best_is_slow, TEST, extra_ms=0.2 - 0.9)[0].tolist() == [0, 2]
    assert baselines.slowest_feasible(TEST, -0.9)[0].tolist() == [2, 3]
    assert baselines.per_question_oracle(evaluation_set("a", [[0, 0, 1, 0]]), -0.9).tolist() == [[2, 2]]


def test_another_drop_order_is_chosen_where_it_is_better_and_takes_as_long():
    # Candidates 4 to 7 take as long as 0 to 3. In the other order the second configuration is right twice.
    union = evaluation_set("aa", [[1, 0, 0, 1, 0, 1, 0, 0], [0, 0, 0, 1, 0, 1, 0, 0]])
    assert table(union, union).tolist() == [[5, 5]] * 2  # under 9 ms 3 is as good, and slower
    own = evaluation_set("aa", [[1, 0, 0, 1], [0, 0, 0, 1]])
    assert table(own, own).tolist() == [[0, 3]] * 2
    assert table(union, union, extra_ms=0.4).tolist() == [[0, 5]] * 2  # 2.2 + 0.4 ms do not fit in 2.5


def test_one_configuration_per_question_type_or_first_word_by_hand():
    # Type a: 0 is right twice. Type b: 1 and 2 are right; under 9 ms the better one over all types is 2. Type c is new.
    expected = [[0, 0], [1, 2], [0, 0]]
    assert table(SELECTION, TEST, baselines.question_type).tolist() == expected
    assert table(SELECTION, TEST, baselines.first_word).tolist() == expected
    assert baselines.first_word(TEST.questions[0]) == "a"


def test_the_oracle_takes_the_fastest_that_is_right():
    assert baselines.per_question_oracle(TEST).tolist() == [[1, 1], [0, 0], [0, 0]]
    assert TEST.accuracy_of(baselines.per_question_oracle(TEST)).tolist() == [[1, 1], [1, 1], [0, 0]]


def test_slowest_feasible_and_cheapest():
    assert baselines.slowest_feasible(TEST).tolist() == [[1, 3]] * 3
    assert baselines.cheapest(TEST).tolist() == [[0, 0]] * 3


def test_imitation_may_choose_any_of_the_most_accurate_that_fit():
    # Under 2.5 ms 0 and 1 fit. The first question: 1 alone is right, then 1 and 3. The second: nothing is. The third is
    # half right with 0, and wholly with 2.
    training = evaluation_set("aab", [[0, 1, 0, 1], [0, 0, 0, 0], [0.5, 0, 1, torch.nan]])
    right = baselines.right_configurations(training, 4)
    assert right.int().tolist() == [
        [0, 1, 0, 0],
        [0, 1, 0, 1],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [1, 0, 0, 0],
        [0, 0, 1, 0],
    ]
    logp = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().expand(2, -1)
    # p(1) = 0.2; p(1) + p(3) = 0.6: the label does not prefer one of them.
    assert_close(baselines._logp_of_any(logp, right[:2]), torch.tensor([0.2, 0.6]).log())


right = st.lists(st.lists(st.integers(0, 1), min_size=8, max_size=8), min_size=6, max_size=6)


@given(right, st.lists(st.floats(0.5, 6), min_size=2, max_size=2), st.integers(0, 99), st.floats(-1, 1))
def test_no_method_beats_the_per_question_oracle_and_all_are_feasible(accuracy, budgets, seed, extra_ms):
    questions = evaluation_set("ababab", accuracy, tuple(budgets))
    best = questions.accuracy_of(baselines.per_question_oracle(questions, extra_ms))
    for chosen in (
        table(questions, questions, extra_ms=extra_ms),
        table(questions, questions, baselines.question_type, extra_ms),
        baselines.random_feasible(questions, extra_ms, seed),
        baselines.slowest_feasible(questions, extra_ms),
        baselines.cheapest(questions),
    ):
        assert (questions.accuracy_of(chosen) <= best).all()
        assert questions.feasible(extra_ms).gather(2, chosen[..., None]).all()
    by_type, by_budget = (
        questions.accuracy_of(table(questions, questions, group_of, extra_ms)).mean(0)
        for group_of in (baselines.question_type, baselines.no_group)
    )
    assert (by_type >= by_budget).all()  # on the set they were chosen on
