import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.errors import UserError
from groupwise.core.shape import PLACEMENTS, StepShape, nearest_fitting


def test_the_question_of_eight_ranks():
    # 8 ranks x 2 rows x 2 passes = 32 rollouts = 8 groups of 4
    shape = StepShape(conditions=8, conditions_per_step=8, group_size=4, ranks=8, rows_per_pass=2, kind="shuffled")
    assert (shape.rollouts_per_step, shape.rollouts_per_rank, shape.passes) == (32, 4, 2)


def test_a_group_may_span_passes():
    shape = StepShape(conditions=2, conditions_per_step=2, group_size=12, ranks=8, rows_per_pass=1, kind="spread")
    assert shape.passes == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group_size": 1}, "group_size is 1"),
        ({"rows_per_pass": 0}, "rows_per_pass is 0"),
        ({"conditions": 3}, "dataset holds 3 conditions"),
        ({"conditions": 5}, "could repeat a condition"),
        ({"conditions_per_step": 3, "conditions": 30}, "does not divide over 2 ranks"),
        ({"rows_per_pass": 3}, "neither divides group_size 4"),
        ({"kind": "spread", "rows_per_pass": 3}, "do not fill passes"),
    ],
)
def test_what_does_not_fit_is_refused(change, says):
    fitting = {"conditions": 4, "conditions_per_step": 4, "group_size": 4, "ranks": 2, "rows_per_pass": 2}
    with pytest.raises(UserError, match=says):
        StepShape(**{**fitting, **change})


def test_the_nearest_values_are_named():
    # 3 conditions x 4 = 12 rollouts; 16 seats. 4 x 4 = 16 and 3 x 16 = 48 fill them; 12 / 8 fits no number of rows.
    with pytest.raises(UserError, match=r"conditions_per_step 4; group_size 16; ranks 6\."):
        StepShape(conditions=30, conditions_per_step=3, group_size=4, ranks=8, rows_per_pass=2, kind="spread")


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
    kind=st.sampled_from(PLACEMENTS),
)
def test_every_value_that_a_refusal_names_does_fit(per_step, group_size, ranks, rows, kind):
    numbers = {
        "conditions": 100,
        "conditions_per_step": per_step,
        "group_size": group_size,
        "ranks": ranks,
        "rows_per_pass": rows,
    }
    try:
        StepShape(**numbers, kind=kind)
    except UserError:
        refused = object.__new__(StepShape)
        refused.__dict__.update(numbers, kind=kind)
        for name in numbers:
            for value in nearest_fitting(refused, name):
                StepShape(**{**numbers, name: value}, kind=kind)
