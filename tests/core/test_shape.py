import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.errors import UserError
from groupwise.core.shape import PLACEMENTS, StepShape, even_pass_sizes, nearest_fitting


def test_the_question_of_eight_ranks():
    # 8 ranks x 2 rows x 2 passes = 32 rollouts = 8 groups of 4
    shape = StepShape(conditions=8, conditions_per_step=8, group_size=4, ranks=8, rows_per_pass=2, placement="shuffled")
    assert (shape.rollouts_per_step, shape.rollouts_per_rank, shape.passes) == (32, 4, 2)


def test_a_group_may_span_passes():
    shape = StepShape(conditions=2, conditions_per_step=2, group_size=12, ranks=8, rows_per_pass=1, placement="spread")
    assert shape.passes == 3


def test_rows_per_pass_is_the_most_not_the_exact_number():
    # 2 groups of 5 on 1 rank: 10 rows are passes of 4, 4 and 2
    shape = StepShape(conditions=2, conditions_per_step=2, group_size=5, rows_per_pass=4)
    assert (shape.passes, shape.largest_pass) == (3, 4)
    assert shape.summary().endswith("1 ranks x 3 passes x 4 rows (the last pass has 2)")
    # 128 rows are more than a rank has
    shape = StepShape(conditions=16, conditions_per_step=16, group_size=8, ranks=8, rows_per_pass=128)
    assert (shape.passes, shape.largest_pass) == (1, 16)
    assert shape.summary() == "16 conditions x 8 members = 128 rollouts = 8 ranks x 1 passes x 16 rows"


def test_passes_of_equal_size():
    assert list(even_pass_sizes(12)) == [12, 6, 4, 3, 2, 1]
    assert list(even_pass_sizes(10)) == [
        10,
        5,
        4,
        3,
        2,
        1,
    ]  # 3 passes: 4 + 4 + 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group_size": 1}, "group_size is 1"),
        ({"rows_per_pass": 0}, "rows_per_pass is 0"),
        ({"conditions": 3}, "dataset holds 3 conditions"),
        ({"conditions": 5}, "could repeat a condition"),
        ({"conditions_per_step": 3, "conditions": 30}, "does not divide over 2 ranks"),
        ({"placement": "spread", "ranks": 3}, "4 x group_size 4 = 16 rollouts, which 3 ranks cannot share evenly"),
    ],
)
def test_what_does_not_fit_is_refused(change, says):
    fitting = {"conditions": 4, "conditions_per_step": 4, "group_size": 4, "ranks": 2, "rows_per_pass": 2}
    with pytest.raises(UserError, match=says):
        StepShape(**{**fitting, **change})


def test_the_nearest_values_are_named():
    # 3 conditions x 4 = 12 rollouts on 8 ranks: 2 or 4 conditions, or groups of 8, divide; so do 6 or 12 ranks
    with pytest.raises(UserError, match=r"conditions_per_step 2 or 4; group_size 8; ranks 6 or 12\."):
        StepShape(conditions=30, conditions_per_step=3, group_size=4, ranks=8, rows_per_pass=2, placement="spread")


def test_a_hopeless_number_is_refused_at_once():
    begun = time.process_time()
    with pytest.raises(UserError, match="conditions_per_step 100"):
        StepShape(conditions=100, conditions_per_step=10**6, group_size=4)
    assert time.process_time() - begun < 0.5


@given(
    per_step=st.integers(1, 12),
    group_size=st.integers(2, 12),
    ranks=st.integers(1, 8),
    rows=st.integers(1, 8),
    placement=st.sampled_from(PLACEMENTS),
)
def test_every_value_that_a_refusal_names_does_fit(per_step, group_size, ranks, rows, placement):
    numbers = {
        "conditions": 100,
        "conditions_per_step": per_step,
        "group_size": group_size,
        "ranks": ranks,
        "rows_per_pass": rows,
    }
    try:
        fitting = StepShape(**numbers, placement=placement)
    except UserError as refused:
        named = re.findall(r"(\w+) ([\d or]+)[;.]", str(refused).partition("Nearest that fit: ")[2])
        suggestions = {name: [int(value) for value in values.split(" or ")] for name, values in named}
        assert suggestions
    else:
        suggestions = {name: nearest_fitting(fitting, name) for name in numbers}
    for name, values in suggestions.items():
        for value in values:
            StepShape(**{**numbers, name: value}, placement=placement)
