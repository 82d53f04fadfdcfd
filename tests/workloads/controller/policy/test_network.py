"""The controller's network: its size, its sinusoids, its masks, gradient in every part, and its fused form."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny.llava import MOLMOE, OPTIONS
from torch.testing import assert_close

from groupwise.workloads.controller.config import BUDGET_DIM, OVERVIEW_PIXELS
from groupwise.workloads.controller.policy.decide import choices_to_knobs, greedy_option, sample_option
from groupwise.workloads.controller.policy.network import (
    BudgetEncoder,
    ControllerNetwork,
    allowed_options,
    masked_log_softmax,
    parameter_counts,
)


def test_about_a_million_parameters_at_width_2048():
    counts = parameter_counts(ControllerNetwork(2048, MOLMOE))
    # stage one: (2048 + 1) 256 + 144 x 256 + (256 + 1) 256 + (512 + 1) 256 + (256 + 1) (3 + 5)
    assert counts["stage_one"] == 760_584
    assert parameter_counts(ControllerNetwork(2048, MOLMOE, sees_overview=False))["stage_one"] == 723_720
    # stage two: (2048 + 1) 128 + (256 + 1) 128 + 5 x 128 + (128 + 1) 128 + (128 + 1) (5 + 5)
    assert counts["stage_two"] == 313_610
    assert 1e6 < counts["stage_one"] + counts["stage_two"] < 1.5e6
    assert counts["encoder"] == 33 * 256 + 257 * 256


def test_every_sinusoid_varies_with_the_budget_and_no_two_budgets_are_alike():
    sinusoids = BudgetEncoder().sinusoids(torch.linspace(0, 1, 41))
    assert sinusoids.std(0).min() > 0.2
    apart = torch.cdist(sinusoids, sinusoids) + torch.eye(41) * 9
    assert apart.min() > 0.3


def test_the_same_seed_gives_the_same_weights_and_leaves_torchs_own_generator_alone():
    before = torch.get_rng_state()
    one, same, other = (ControllerNetwork(32, OPTIONS, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["stage_one.join.weight"], other["stage_one.join.weight"])
    assert torch.equal(before, torch.get_rng_state())


def test_every_head_gets_a_gradient():
    policy = ControllerNetwork(32, OPTIONS)
    budget = policy.encoder(torch.linspace(0, 1, 6))
    first = policy.stage_one(torch.randn(6, 32), torch.randn(6, OVERVIEW_PIXELS), budget)
    second = policy.stage_two(torch.randn(6, 32), torch.tensor([0, 1, 2, 0, 1, 2]), budget, torch.arange(6))
    torch.stack([logits.log_softmax(1)[:, 0].sum() for logits in (*first, *second)]).sum().backward()
    for name, weight in policy.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.any(), name


def test_a_dense_model_has_no_top_k_to_learn():
    dense = ControllerNetwork(32, replace(OPTIONS, full_top_k=0, smallest_top_k=0))
    assert not [name for name, _ in dense.named_parameters() if "top_k" in name]
    nothing = torch.zeros(3, dtype=torch.long)
    top_k, _ = dense.stage_two(torch.randn(3, 32), nothing, torch.randn(1, 256), nothing)
    assert top_k.shape == (3, 1)


def test_masks_by_hand():
    fits = torch.zeros(1, 2, 1, 2, 3, dtype=torch.bool)
    fits[0, 1, 0, 0, 2] = True
    one, zero = torch.tensor([1]), torch.tensor([0])
    assert allowed_options(fits, []).tolist() == [[False, True]]
    assert allowed_options(fits, [one, zero]).tolist() == [[True, False]]
    assert allowed_options(fits, [one, zero, zero]).tolist() == [[False, False, True]]
    logp = masked_log_softmax(torch.tensor([[1.0, 2.0, 2.0]]), torch.tensor([[False, True, True]]))
    assert_close(logp.exp(), torch.tensor([[0.0, 0.5, 0.5]]))


@given(
    st.lists(st.booleans(), min_size=2, max_size=6).filter(any), st.floats(0, 1, exclude_max=True), st.integers(0, 99)
)
def test_what_is_not_allowed_is_never_sampled(options, uniform, seed):
    torch.manual_seed(seed)
    logp = masked_log_softmax(4 * torch.randn(1, len(options)), torch.tensor([options]))
    assert options[int(sample_option(torch.full((1, 4), uniform, dtype=torch.float64))(2, logp))]
    assert options[int(greedy_option(2, logp))]


def test_samples_follow_the_probabilities():
    logp = torch.tensor([0.2, 0.0, 0.5, 0.3]).log().clamp(min=-1e4).expand(1000, 4)
    uniforms = ((torch.arange(1000) + 0.5) / 1000).double()[:, None].expand(-1, 4)
    assert torch.bincount(sample_option(uniforms)(0, logp), minlength=4).tolist() == pytest.approx(
        [200, 0, 500, 300], abs=1
    )


def test_indices_of_options_become_knobs():
    (knobs,) = choices_to_knobs(MOLMOE, torch.tensor([[1, 4, 0, 3]]))
    assert (knobs.tier, knobs.insertion_position, knobs.top_k, knobs.blocks) == ("medium", 5, 4, 15)


@pytest.mark.parametrize("options", [OPTIONS, replace(OPTIONS, full_top_k=0, smallest_top_k=0)])
@pytest.mark.parametrize("sees_overview", [True, False])
@torch.no_grad()
def test_the_fused_network_computes_the_same(options, sees_overview):
    network = ControllerNetwork(32, options, sees_overview=sees_overview, seed=3)
    fused, overviews = network.fused(), torch.randn(4, OVERVIEW_PIXELS)
    question, token, budgets = torch.randn(4, 32), torch.randn(4, 32), torch.tensor([0.0, 0.3, 0.3, 1.0])
    positions, encoded = torch.tensor([0, 1, 2, 0]), network.encoder(budgets)
    one = network.stage_one(question, overviews, encoded)
    two = network.stage_two(token, positions, encoded, torch.arange(4))
    for row, (budget, position) in enumerate(zip(budgets.tolist(), positions.tolist(), strict=True)):
        for logits, scores in zip(one, fused.stage_one(question[row], overviews[row], budget), strict=True):
            assert_close(torch.tensor(scores), logits[row], rtol=0, atol=1e-5)
        for logits, scores in zip(two, fused.stage_two(token[row], position, budget), strict=True):
            assert_close(torch.tensor(scores), logits[row], rtol=0, atol=1e-5)


def test_the_fused_network_keeps_the_weights_it_was_made_of():
    network = ControllerNetwork(32, OPTIONS, seed=3)
    fused, seen = network.fused(), (torch.randn(32), torch.randn(OVERVIEW_PIXELS))
    before = fused.stage_one(*seen, 0.5)
    with torch.no_grad():
        network.stage_one.prompt.weight.zero_()
    assert fused.stage_one(*seen, 0.5) == before != network.fused().stage_one(*seen, 0.5)


@torch.no_grad()
def test_stage_one_looks_only_if_it_may():
    question, budget = torch.randn(2, 32), torch.zeros(2, BUDGET_DIM)
    looking, blind = (ControllerNetwork(32, OPTIONS, sees_overview=sees).stage_one for sees in (True, False))
    bright, dark = torch.ones(2, OVERVIEW_PIXELS), torch.zeros(2, OVERVIEW_PIXELS)
    assert not torch.equal(looking(question, bright, budget)[0], looking(question, dark, budget)[0])
    assert torch.equal(blind(question, bright, budget)[0], blind(question, dark, budget)[0])
