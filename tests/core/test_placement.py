import math
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.errors import UserError
from groupwise.core.placement import place
from groupwise.core.shape import PLACEMENTS, StepShape


@st.composite
def shapes(draw, placement=None):
    """Shapes that fit, whatever their placement, ranks and rows; rows_per_pass need not divide anything."""
    placement = placement or draw(st.sampled_from(PLACEMENTS))
    ranks, rows, group_size = draw(st.integers(1, 6)), draw(st.integers(1, 30)), draw(st.integers(2, 12))
    smallest = ranks if placement == "whole" else ranks // math.gcd(ranks, group_size)
    per_step = smallest * draw(st.integers(1, 5))
    conditions = draw(st.one_of(st.just(per_step), st.integers(2 * per_step - 1, 9 * per_step)))
    return StepShape(conditions, per_step, group_size, ranks, rows, placement)


@given(shapes(), st.integers(0, 10**12), st.integers(0, 2**63 - 1))
def test_each_condition_has_each_member_once_in_a_slot_of_its_own(shape, step, seed):
    placed = place(shape, seed=seed, step=step)
    members = Counter(zip(placed.condition.tolist(), placed.member.tolist(), strict=True))
    assert set(members.values()) == {1}
    assert Counter(placed.condition.tolist()) == dict.fromkeys(set(placed.condition.tolist()), shape.group_size)
    assert len(set(placed.condition.tolist())) == shape.conditions_per_step
    slots = list(zip(placed.rank.tolist(), placed.pass_index.tolist(), placed.slot.tolist(), strict=True))
    assert slots == sorted(set(slots)), "slots are taken rank by rank, pass by pass, none twice"
    assert placed.slot.max() == shape.largest_pass - 1
    assert placed.pass_index.max() == shape.passes - 1


@given(shapes())
def test_the_passes_are_full_but_for_the_last(shape):
    placed = place(shape, seed=1, step=2)
    for rank in range(shape.ranks):
        passes = list(placed.rows_of(rank).passes())
        assert len(passes) == shape.passes
        assert all(len(part) == shape.rows_per_pass for part in passes[:-1])
        assert sum(map(len, passes)) == shape.rollouts_per_rank
        for index, part in enumerate(passes):
            here = (placed.rank == rank) & (placed.pass_index == index)
            assert torch.equal(placed.group[here], part.group)
            assert torch.equal(placed.member[here], part.member)


@given(shapes(), st.integers(1, 30))
def test_rows_per_pass_changes_no_rollout_and_no_random_number(shape, rows):
    placed, again = (place(each, seed=1, step=2) for each in (shape, replace(shape, rows_per_pass=rows)))
    for rank in range(shape.ranks):
        here, there = placed.rows_of(rank), again.rows_of(rank)
        assert torch.equal(here.group, there.group)
        assert torch.equal(here.member, there.member)
        numbers = [torch.cat([part.normal(3, 2) for part in run.passes()]) for run in (here, there)]
        assert torch.equal(*numbers)


@given(shapes(), st.integers(0, 1000))
def test_the_ranks_together_run_what_one_rank_would(shape, step):
    placed = place(shape, seed=3, step=step)
    alone = place(StepShape(shape.conditions, shape.conditions_per_step, shape.group_size), seed=3, step=step)
    together = [
        row
        for rank in range(shape.ranks)
        for part in placed.rows_of(rank).passes()
        for row in zip(part.group.tolist(), part.member.tolist(), part.condition.tolist(), strict=True)
    ]
    assert sorted(together) == sorted(
        zip(alone.group.tolist(), alone.member.tolist(), alone.condition.tolist(), strict=True)
    )


@given(shapes(placement="whole"))
def test_whole_keeps_a_group_on_one_rank_and_in_as_few_passes_as_can_be(shape):
    placed = place(shape, seed=0, step=0)
    assert placed.ranks_touched().tolist() == [1] * shape.conditions_per_step
    for group in placed.group.unique():
        passes = placed.pass_index[placed.group == group]
        assert torch.equal(passes.unique(), torch.arange(passes.min(), passes.max() + 1)), "passes that follow another"
    if shape.group_size % shape.rows_per_pass == 0 or shape.rows_per_pass % shape.group_size == 0:
        for group in placed.group.unique():
            in_passes = Counter(placed.pass_index[placed.group == group].tolist())
            assert set(in_passes.values()) == {min(shape.group_size, shape.rows_per_pass)}


@given(shapes(placement="spread"))
def test_spread_deals_members_as_evenly_as_can_be(shape):
    placed = place(shape, seed=0, step=0)
    for group in placed.group.unique():
        on_ranks = Counter(placed.rank[placed.group == group].tolist())
        assert len(on_ranks) == min(shape.group_size, shape.ranks)
        assert max(on_ranks.values()) - min(on_ranks.values()) <= 1


def test_shuffled_spreads_a_group_over_four_ranks_as_often_as_chance_has_it():
    # 8 ranks x 2 rows, 4 groups of 4: 4 ranks in 61.5 % of groups (8 choose 4 x 2^4 / 16 choose 4), 3 in 36.9 %
    shape = StepShape(10_000, 4, 4, ranks=8, rows_per_pass=2, placement="shuffled")
    touched = torch.cat([place(shape, seed=0, step=step).ranks_touched() for step in range(2000)])
    assert (touched == 4).double().mean() == pytest.approx(1120 / 1820, abs=0.02)
    assert (touched == 2).double().mean() == pytest.approx(28 / 1820, abs=0.005)


@pytest.mark.parametrize(("conditions", "per_step"), [(12, 4), (13, 4), (7, 4), (101, 8), (9, 9), (1, 1), (3, 2)])
def test_an_epoch_visits_each_condition_once_and_no_step_repeats_one(conditions, per_step):
    shape = StepShape(conditions, per_step, group_size=2)
    steps = [place(shape, seed=5, step=step).condition[::2].tolist() for step in range(8 * conditions)]
    assert all(len(set(step)) == per_step for step in steps)
    stream = [condition for step in steps for condition in step]
    epochs = [stream[start : start + conditions] for start in range(0, len(stream) - conditions + 1, conditions)]
    assert all(sorted(epoch) == list(range(conditions)) for epoch in epochs)
    if conditions > 4:
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_ten_million_conditions_and_4096_ranks_take_under_50_ms():
    shape = StepShape(
        10_000_000, conditions_per_step=8192, group_size=8, ranks=4096, rows_per_pass=4, placement="shuffled"
    )
    straddling = 10_000_000 // 8192  # the dearest step: it ends one epoch and begins the next
    for step in (straddling, 10**9):
        milliseconds = []
        for _ in range(8):  # the best of eight: other processes may have the core meanwhile
            begun = time.process_time()
            place(shape, seed=0, step=step).rows_of(4095)
            milliseconds.append(1000 * (time.process_time() - begun))
        assert min(milliseconds) < 50


def two_halves_swapped(shape: StepShape, seed: int, step: int) -> torch.Tensor:
    return torch.arange(shape.rollouts_per_step).roll(shape.rollouts_per_step // 2)


def everyone_at_position_zero(shape: StepShape, seed: int, step: int) -> torch.Tensor:
    return torch.zeros(shape.rollouts_per_step, dtype=torch.int64)


def test_a_placement_of_ones_own():
    placed = place(StepShape(2, 2, 2, placement=f"{__name__}:two_halves_swapped"), seed=0, step=0)
    assert placed.group.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("name", "says"),
    [("everyone_at_position_zero", "a position of its own"), ("no_such", "cannot be imported")],
)
def test_a_wrong_placement_of_ones_own_is_refused(name, says):
    with pytest.raises(UserError, match=says):
        place(StepShape(2, 2, 2, placement=f"{__name__}:{name}"), seed=0, step=0)


def test_an_unknown_placement_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="whole, spread, shuffled"):
        place(StepShape(2, 2, 2, placement="scattered"), seed=0, step=0)


@given(shapes(), st.integers(0, 50), st.data())
def test_costs_move_groups_and_change_nothing_else(shape, step, data):
    table = torch.tensor(data.draw(st.lists(st.integers(1, 9), min_size=17, max_size=17)), dtype=torch.float64)
    plain = place(shape, seed=3, step=step)
    balanced = place(shape, seed=3, step=step, costs=lambda conditions: table[conditions % 17])

    def rollouts(placed):
        return set(zip(placed.group.tolist(), placed.member.tolist(), placed.condition.tolist(), strict=True))

    assert rollouts(balanced) == rollouts(plain), "same groups, same keys of random numbers"
    assert sorted(balanced.ranks_touched().tolist()) == sorted(plain.ranks_touched().tolist())
    if shape.placement == "shuffled" or shape.ranks == 1:
        assert torch.equal(balanced.group, plain.group)
    if shape.placement == "whole":
        assert balanced.ranks_touched().max() == 1
