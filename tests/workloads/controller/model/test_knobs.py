"""The options of every knob: which configurations there are, and what is refused."""

import pytest
from tiny.llava import CROPS, OPTIONS

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import default_drop_order
from groupwise.workloads.controller.model.knobs import KnobOptions, Knobs

KNOBS = list(OPTIONS.configurations())


def test_block_totals_are_the_same_for_every_insertion_position():
    for knobs in KNOBS:
        path = OPTIONS.block_path(knobs)
        assert sum(k > 0 for k in path) == knobs.blocks
        assert set(path[: knobs.insertion_position]) == {OPTIONS.full_top_k}
        assert set(path[knobs.insertion_position :]) <= {0, knobs.top_k}
    assert len(KNOBS) == 3 * 3 * 4 * 4


def test_too_few_blocks_and_a_short_drop_order_are_refused():
    small = KnobOptions(
        CROPS, total_blocks=1, full_top_k=4, drop_order=(), insertion_positions=(1,), max_dropped_blocks=0
    )
    assert list(small.unavailable) == ["insertion_position", "top_k", "blocks"]
    with pytest.raises(UserError, match="cannot offer the blocks knob, since it has 1 blocks, too few"):
        small.check(Knobs("low", 1, 4, 2))
    # MolmoE's four least important blocks: from insertion position 5 on only two of them can go.
    with pytest.raises(
        UserError, match="from insertion position 5 on it names 2 of 16 blocks, and max_dropped_blocks is 4"
    ):
        KnobOptions(CROPS, total_blocks=16, full_top_k=8, drop_order=(4, 13, 10, 2))


def test_the_default_drop_order_is_enough_for_every_depth():
    assert default_drop_order(16)[:4] == [11, 10, 12, 9]
    assert default_drop_order(16, (4, 13, 10, 2))[:6] == [4, 13, 10, 2, 11, 12]
    for total in (*range(1, 30), 48, 94):
        order = default_drop_order(total)
        assert sorted(order) == list(range(1, total - 1))


def test_configurations_come_in_the_order_of_a_table():
    assert OPTIONS.shape == (3, 3, 4, 4)
    assert KNOBS[0] == Knobs("low", 1, 1, 5)
    assert KNOBS[-1] == Knobs("high", 3, 4, 8)
    # tier 1, position 2, top-k 0, blocks 3 of the table
    assert KNOBS[((1 * 3 + 2) * 4 + 0) * 4 + 3] == Knobs("medium", 3, 1, 8)
