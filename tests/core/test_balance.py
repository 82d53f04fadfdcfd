"""Groups dealt by cost: the same rollouts, in places that give all ranks about as much to do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.balance import idle_share, order_by_cost
from groupwise.core.expected_idle import CostSpread, expected_idle_share
from groupwise.core.shape import StepShape


def test_idle_share_by_hand():
    # rollout: 2 and 4 s, mean 3 of 4; update: 4 and 2 s. Each rank waits 2 of 8 s, in one stage or the other
    assert idle_share(torch.tensor([[2.0, 4.0], [4.0, 2.0]])) == pytest.approx(0.25)
    assert idle_share(torch.ones(4, 3)) == 0
    assert idle_share(torch.zeros(2, 3)) == 0


def test_groups_are_dealt_to_the_least_busy_rank():
    # dearest first 9 6 4 2 1 0: 9 to rank 0; 6 and 4 to rank 1, then 2 to rank 0, 1 to rank 1 (10 < 11), 0 to rank 0
    shape = StepShape(100, 6, 2, 2, 1, "whole")
    assert order_by_cost(shape, torch.tensor([0.0, 9, 1, 4, 2, 6])).tolist() == [1, 4, 0, 5, 3, 2]
    assert order_by_cost(shape, torch.ones(6)).tolist() == [0, 1, 2, 3, 4, 5], "equal costs change nothing"


@given(st.integers(1, 8), st.integers(1, 20), st.data())
def test_no_rank_has_much_more_than_its_share_nor_more_than_without_order(ranks, per_rank, data):
    groups = ranks * per_rank
    costs = torch.tensor(data.draw(st.lists(st.integers(0, 1000), min_size=groups, max_size=groups))).double()
    order = order_by_cost(StepShape(10**6, groups, 2, ranks, 1, "whole"), costs)
    assert sorted(order.tolist()) == list(range(groups))
    busiest = costs[order].view(ranks, per_rank).sum(1).max()
    assert busiest <= costs.view(ranks, per_rank).sum(1).max()
    assert busiest <= costs.sum() / ranks + costs.max() - costs.min()


@pytest.mark.parametrize("placement", ["whole", "spread", "shuffled"])
def test_equal_costs_leave_no_rank_waiting(placement):
    shape = StepShape(10**6, 8, 4, 8, 2, placement)
    assert expected_idle_share(shape, CostSpread(0, 0), ordered=False) == pytest.approx(0, abs=1e-12)


def test_two_ranks_with_one_group_each_by_hand():
    """Costs exp(0.3 z): the idle share is (max - mean) / max = (1 - exp(-|d|)) / 2 with d of deviation 0.3 sqrt(2)."""
    shape = StepShape(10**6, 2, 2, 2, 2, "whole")
    deviation = 0.3 * 2**0.5
    values = torch.linspace(-8, 8, 100_001, dtype=torch.float64) * deviation
    density = torch.exp(-(values**2) / (2 * deviation**2)) / (deviation * (2 * torch.pi) ** 0.5)
    exact = torch.trapezoid((1 - (-values.abs()).exp()) / 2 * density, values).item()
    shares = [expected_idle_share(shape, CostSpread(0.3, 0), ordered=False, seed=seed) for seed in range(200)]
    assert sum(shares) / len(shares) == pytest.approx(exact, rel=0.05)


def test_order_by_cost_helps_by_what_is_known():
    shape = StepShape(10**6, 64, 4, 8, 2, "whole")
    idle = {
        (members, ordered): expected_idle_share(shape, CostSpread(0.5, members), ordered=ordered)
        for members in (0.0, 0.8)
        for ordered in (False, True)
    }
    assert idle[0.0, True] < 0.25 * idle[0.0, False], "all is known"
    assert idle[0.0, True] < idle[0.8, True] < idle[0.8, False]


def test_ranks_that_wait_after_each_pass_wait_longer():
    shape = StepShape(10**6, 16, 8, 4, 4, "whole")
    at_end = expected_idle_share(shape, CostSpread(), ordered=False)
    assert expected_idle_share(shape, CostSpread(), ordered=False, wait_after_pass=True) > at_end
