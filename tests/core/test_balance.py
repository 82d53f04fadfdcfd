"""Groups dealt by cost: the same rollouts, in places that give all ranks about as much to do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.balance import idle_share, order_by_cost
from groupwise.core.shape import StepShape


def test_idle_share_by_hand():
    # rollout: 2 and 4 s, mean 3 of 4; update: 4 and 2 s. Each rank waits 2 of 8 s, in one stage or the other
    assert idle_share(torch.tensor([[2.0, 4.0], [4.0, 2.0]])) == pytest.approx(0.25)
    assert idle_share(torch.ones(4, 3)) == 0
    assert idle_share(torch.zeros(2, 3)) == 0


def test_groups_are_dealt_back_and_forth():
    # dearest first 5 4 | 3 2 | 1 0, dealt to two ranks: 5 2 1 and 4 3 0; each rank in the groups' own order
    shape = StepShape(100, 6, 2, 2, 1, "whole")
    assert order_by_cost(shape, torch.tensor([10.0, 11, 12, 13, 14, 15])).tolist() == [1, 2, 5, 0, 3, 4]
    assert order_by_cost(shape, torch.ones(6)).tolist() == [0, 1, 2, 3, 4, 5], "equal costs change nothing"


@given(st.integers(1, 8), st.integers(1, 20), st.data())
def test_no_two_ranks_differ_by_more_than_the_costs_do(ranks, per_rank, data):
    groups = ranks * per_rank
    costs = torch.tensor(data.draw(st.lists(st.integers(0, 1000), min_size=groups, max_size=groups))).double()
    order = order_by_cost(StepShape(10**6, groups, 2, ranks, 1, "whole"), costs)
    assert sorted(order.tolist()) == list(range(groups))
    if ranks > 1 and costs.min() < costs.max():
        loads = costs[order].view(ranks, per_rank).sum(1)
        assert loads.max() - loads.min() <= costs.max() - costs.min()
