"""Bytes by part, by hand; how many conditions a pass may have."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.placement import place
from groupwise.core.shape import PLACEMENTS, StepShape
from groupwise.memory.stages import (
    FRAMEWORK_MARGIN_BYTES,
    StageBytes,
    StepSpec,
    WeightBytes,
    peak_of_rollout,
    peak_of_update,
)


def test_the_parts_by_hand():
    # 10 frozen parameters of 2 bytes, 5 trained ones of 4
    spec = StepSpec(StepShape(10, 2, 2), has_ema=True)
    weights = WeightBytes(10, 5, 2, 4)
    parts = {"weights": 40, "gradients": 20, "optimizer": 40, "EMA weights": 20, "reference": 0}
    assert weights.by_part(spec) == parts
    assert weights.by_part(spec, reference_copies=1) == parts | {"reference": 40}
    assert weights.optimizer_temporaries(spec) == 20
    stages = StageBytes({"a": 100}, {"a": 60, "b": 60})
    assert (stages.peak, stages.largest_stage) == (120, "update")
    assert stages.with_margin().peak == 120 + 6 + FRAMEWORK_MARGIN_BYTES


def test_gradients_that_come_while_activations_go_are_not_added():
    persistent = {"weights": 5, "gradients": 30}
    one_pass = peak_of_update(persistent, [{"activations": 50}], {"optimizer temporaries": 1}, one_pass=True)
    assert one_pass == {"weights": 5, "activations": 50}
    assert (
        peak_of_update(persistent, [{"activations": 50}], {"optimizer temporaries": 1}, one_pass=False)["gradients"]
        == 30
    )
    at_the_step = peak_of_update(persistent, [{"activations": 3}], {"optimizer temporaries": 9}, one_pass=False)
    assert at_the_step == persistent | {"optimizer temporaries": 9}


def test_a_rollout_has_no_gradients_and_takes_its_largest_candidate():
    persistent = {"weights": 5, "gradients": 30, "reference": 0}
    assert peak_of_rollout(persistent, [{"a": 1, "b": 1}, {"c": 3}]) == {"weights": 5, "c": 3}


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 3), st.integers(1, 20), st.sampled_from(PLACEMENTS))
def test_no_pass_has_more_conditions_than_planned(group_size, groups, ranks, rows, placement):
    shape = StepShape(100, groups * ranks, group_size, ranks, rows, placement)
    conditions = defaultdict(set)
    placed = place(shape, seed=0, step=0)
    for rank, index, group in zip(placed.rank.tolist(), placed.pass_index.tolist(), placed.group.tolist(), strict=True):
        conditions[rank, index].add(group)
    most = StepSpec(shape).conditions_in(shape.largest_pass)
    assert max(map(len, conditions.values())) <= most
    if placement == "whole" and (rows % group_size == 0 or group_size % rows == 0):
        assert max(map(len, conditions.values())) == most
