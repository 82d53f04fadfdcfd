"""Packed attention and experts: the fallback equals the grouped call, and unsupported attention is refused."""

import pytest
import torch
from torch.nn.functional import linear
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.packing import (
    PackedRows,
    WorkCounter,
    _grouped_linear,
    _Runs,
    packed_attention,
    packed_rows,
    row_layout,
)


@pytest.mark.parametrize(("dtype", "width", "out"), [("float32", 8, 4), ("float64", 8, 4), ("float32", 6, 5)])
def test_each_run_of_rows_is_multiplied_by_its_expert(dtype, width, out):
    source, kind = torch.Generator().manual_seed(0), getattr(torch, dtype)
    rows = torch.randn(10, width, generator=source, dtype=kind)
    weights = torch.randn(3, out, width, generator=source, dtype=kind)
    by_hand = torch.cat([linear(rows[:4], weights[0]), linear(rows[4:], weights[2])])
    assert_close(_grouped_linear(rows, weights, _Runs(torch.tensor([4, 4, 10], dtype=torch.int32))), by_hand)


def test_expert_pairs_by_hand():
    # Two tokens of a row whose last block this is, so only the second is read, with top-2; and one token with top-1.
    layout = row_layout((2, 1), (2, 1), (True, False))
    pairs = layout.pairs(columns=2, device=torch.device("cpu"))
    assert pairs.token.tolist() == [1, 1, 2]
    assert pairs.starts.tolist() == [0, 0, 2]
    assert pairs.select(torch.tensor([[10, 11], [12, 13], [14, 15]])).tolist() == [12, 13, 14]
    assert len(pairs) == 3
    assert row_layout((2, 1), (2, 1), (True, False)) is layout


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"sliding_window": 4}, "A prompt of 5 tokens is longer than this model's sliding window of 4"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(2)}, "s_aux"),
    ],
)
def test_attention_that_is_more_than_causal_is_refused(more, says):
    states = torch.zeros(1, 2, 8, 4)
    with packed_rows(PackedRows(row_layout((3, 5), (1, 1)), WorkCounter())):
        packed_attention(None, states, states, states, None, 0.5, sliding_window=5)
        with pytest.raises(UserError, match=says):
            packed_attention(None, states, states, states, None, 0.5, **more)
