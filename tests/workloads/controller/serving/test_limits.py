"""What a budget allows is what the training's masks allow, at any pace; and a server decides as the network does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny.controller import EXECUTOR, question
from tiny.llava import OPTIONS

from groupwise.workloads.controller.conditions import full_configuration, relative_budgets
from groupwise.workloads.controller.config import OVERVIEW_PIXELS
from groupwise.workloads.controller.model.adapters.base import overview_pixels
from groupwise.workloads.controller.model.executor import PrefixItem
from groupwise.workloads.controller.policy.decide import DECISION_ORDER, to_decision_order
from groupwise.workloads.controller.policy.network import ControllerNetwork, allowed_options
from groupwise.workloads.controller.serving.limits import BudgetLimit, LeastBounds, PacedBounds, budget_limit
from groupwise.workloads.controller.serving.server import ControllerServer


def test_bounds_by_hand():
    # one tier, one position; rows are top-ks, columns are block totals
    bound_ms = torch.tensor([[[[3.0, 5.0], [4.0, 7.0]]]])
    bounds = PacedBounds(LeastBounds(bound_ms), factor=2.0, tier_ms=[1.0])
    assert (bounds.cheapest_ms, bounds.full_ms) == (7.0, 15.0)
    assert bounds.relative_budget(9.0) == 0.25
    # blocks come before top-k: the least of their columns are 3 and 5
    assert bounds.of_options([0, 0]) == [7.0, 11.0]
    limit = BudgetLimit(bounds, limit_ms=11.0, relative_budget=0.5)
    assert limit.allowed([0, 0]) == [0, 1]
    assert (limit.allowed([0, 0, 0]), limit.allowed([0, 0, 1])) == ([0, 1], [0])
    assert [BudgetLimit(bounds, 6.9, 0.0).allowed([0] * taken) for taken in range(4)] == [[0]] * 4


def test_under_a_soft_budget_everything_is_allowed_if_something_fits():
    bounds = PacedBounds(LeastBounds(torch.tensor([[[[3.0, 5.0]]]])))
    assert budget_limit(bounds, 4.0, 0.5, is_hard=True).allowed([0, 0]) == [0]
    assert budget_limit(bounds, 4.0, 0.5, is_hard=False).allowed([0, 0]) == [0, 1]
    assert budget_limit(bounds, 2.0, 0.5, is_hard=False).allowed([0, 0]) == [0]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 4)] * 4),
    seed=st.integers(0, 10**6),
    share=st.floats(-0.2, 1.2),
    factor=st.floats(0.5, 3.0),
    distinct=st.integers(1, 50),
)
def test_what_a_limit_allows_is_what_the_masks_allow(shape, seed, share, factor, distinct):
    """Few distinct bounds make many equal ones. The limit is often exactly one of the bounds."""
    generator = torch.Generator().manual_seed(seed)
    fitted_ms = 1.0 + torch.randint(distinct, shape, generator=generator).double()
    tier_ms = torch.rand(shape[0], generator=generator, dtype=torch.float64)
    bound_ms = factor * fitted_ms + tier_ms.view(-1, 1, 1, 1)
    limit_ms = float(bound_ms.min() + share * (bound_ms.max() - bound_ms.min()))
    if seed % 2:
        limit_ms = float(bound_ms.flatten()[seed % bound_ms.numel()])
    bounds = PacedBounds(LeastBounds(fitted_ms), factor, tier_ms.tolist())
    limit = BudgetLimit(bounds, limit_ms, relative_budget=0.5)
    assert (bounds.cheapest_ms, bounds.full_ms) == (float(bound_ms.min()), float(full_configuration(bound_ms)))
    (expected,) = relative_budgets(bound_ms[None], torch.tensor([[limit_ms]], dtype=torch.float64)).flatten().tolist()
    assert bounds.relative_budget(limit_ms) == pytest.approx(expected, abs=1e-12)

    within = bound_ms <= limit_ms
    if not within.any():
        within.view(-1)[bound_ms.flatten().argmin()] = True
    taken: list[int] = []
    for _ in DECISION_ORDER:
        mask = allowed_options(to_decision_order(within[None]), [torch.tensor([choice]) for choice in taken])
        allowed = limit.allowed(taken)
        assert list(allowed) == mask[0].nonzero().flatten().tolist()
        taken.append(allowed[int(torch.randint(len(allowed), (), generator=generator))])


@pytest.mark.parametrize("sees_overview", [True, False])
@torch.inference_mode()
def test_a_server_decides_as_the_network(sees_overview):
    """Random networks, questions, bounds and budgets, with the latency token that the model really has."""
    generator, numbers = torch.Generator().manual_seed(5), range(40)
    served_knobs = set()
    for number in numbers:
        network = ControllerNetwork(32, OPTIONS, sees_overview=sees_overview, seed=number)
        for head in (network.stage_one.tier, network.stage_one.insertion, network.stage_two.top_k):
            head.linear.weight.mul_(20)  # so that the input decides, not the bias
        bound_ms = torch.rand(OPTIONS.shape, generator=generator, dtype=torch.float64)
        limit_ms, budget = torch.rand(2, generator=generator).tolist()
        sample = question(number).sample
        limit = BudgetLimit(PacedBounds(LeastBounds(bound_ms)), limit_ms, budget)
        (served,) = ControllerServer(network, EXECUTOR).serve([(sample, limit)])
        assert served.choices == _decide(network, sample, bound_ms <= limit_ms, budget)
        served_knobs.add(served.knobs)
    assert len(served_knobs) > len(numbers) / 2


def _decide(network, sample, within, budget):
    """The most probable options, by the network's own forward."""
    feasible, taken = to_decision_order(within[None]), []

    def choose(logits):
        taken.append(logits.masked_fill(~allowed_options(feasible, taken), -torch.inf).argmax(1))

    encoded = network.encoder(torch.tensor([budget]))
    embedding = EXECUTOR.adapter.embed(torch.tensor(sample.question_ids)).mean(0)[None]
    overview = overview_pixels(sample)[None]
    assert overview.shape == (1, OVERVIEW_PIXELS)
    for logits in network.stage_one(embedding, overview, encoded):
        choose(logits)
    tier, position = list(OPTIONS.crops_by_tier)[taken[0]], OPTIONS.insertion_positions[taken[1]]
    token = EXECUTOR.run_prefix([PrefixItem([sample], tier)]).latency_tokens[sample.name, tier][position]
    top_k, blocks = network.stage_two(token[None], taken[1], encoded, torch.tensor([0]))
    choose(blocks)
    choose(top_k)
    return tuple(int(taken[decision]) for decision in DECISION_ORDER)
