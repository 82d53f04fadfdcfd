"""Rewards of single decisions: weighed, compared and trained one by one."""

import math

import pytest
import torch
from torch.testing import assert_close

import groupwise as gw
from groupwise.core.advantage import compute_advantages, group_advantages
from groupwise.core.loss import clipped_surrogate, policy_gradient
from groupwise.core.reward import term_statistics, weigh
from groupwise.training.update import StepTotals, loss_of_pass

IDS = torch.tensor([7, 7, 9, 9])
OUTCOME = torch.tensor([1.0, 3.0, 2.0, 2.0], dtype=torch.float64)
STEPS = torch.tensor([[0.0, 2.0], [0.0, 0.0], [0.0, 1.0], [0.0, math.nan]], dtype=torch.float64)


def rewards(**weights):
    return weigh(gw.RewardTerms({"outcome": OUTCOME}, per_decision={"step": STEPS}), gw.RewardConfig(weights=weights))


def test_advantages_of_decisions_by_hand():
    result = compute_advantages(rewards(), IDS, gw.AdvantageConfig(eps=0.0))
    # decision 0: 1, 3 | 2, 2 (no spread); decision 1: 3, 3 (no spread) | 3, missing
    assert_close(result.values, torch.tensor([[-1.0, 0], [1, 0], [0, 0], [0, 0]], dtype=torch.float64))
    assert result.trained_mask.tolist() == [[True, False], [True, False], [False, False], [False, False]]
    assert result.trained.tolist() == [True, True, False, False]
    assert (result.groups, result.zero_spread_groups) == (2, 1)


def test_without_rewards_of_their_own_decisions_follow_the_rollout():
    result = compute_advantages(rewards(step=0.0), IDS)
    assert result.trained_mask is None
    assert_close(result.values, group_advantages(OUTCOME, IDS).values)


def test_equal_step_rewards_are_the_rollouts_own_case():
    flat = weigh(gw.RewardTerms({"outcome": OUTCOME}, per_decision={"step": torch.ones(4, 3)}), gw.RewardConfig())
    assert_close(compute_advantages(flat, IDS).values, group_advantages(OUTCOME, IDS).values[:, None].expand(4, 3))


def test_losses_take_an_advantage_for_each_decision():
    logp = torch.tensor([[0.1, 0.2], [0.3, 0.4]], requires_grad=True)
    advantages = torch.tensor([[1.0, -1.0], [2.0, 0.5]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    policy_gradient(logp, advantages, mask, denominator=2.0).backward()
    assert_close(logp.grad, -advantages / 2)
    one_by_one = clipped_surrogate(logp, logp.detach(), advantages, mask, denominator=1.0)
    assert one_by_one.item() == pytest.approx(-2.5)
    by_row = clipped_surrogate(logp, logp.detach(), advantages[:, 0], mask, denominator=1.0)
    assert by_row.item() == pytest.approx(-6.0)


def test_names_are_checked_and_statistics_are_per_term():
    with pytest.raises(gw.UserError, match="names a reward of rollouts and one of decisions"):
        weigh(gw.RewardTerms({"outcome": OUTCOME}, per_decision={"outcome": STEPS}), gw.RewardConfig())
    with pytest.raises(gw.UserError, match="It has: outcome, step"):
        rewards(other=1.0)
    statistics = term_statistics(gw.RewardTerms({"outcome": OUTCOME}, per_decision={"step": STEPS}))
    assert statistics["reward/step"] == pytest.approx(3 / 7)
    assert statistics["reward/step/missing_fraction"] == pytest.approx(1 / 8)


def test_a_divergence_in_closed_form_takes_the_place_of_the_estimate():
    logp, mask = torch.zeros(1, 2, requires_grad=True), torch.tensor([[True, False]])
    rollouts = gw.Rollouts(torch.tensor([1]), torch.zeros(1, 2), mask)
    scored = gw.Scores(logp, kl=torch.tensor([[3.0, 100.0]]) * (1 + logp))
    loss, parts = loss_of_pass(scored, rollouts, torch.zeros(1), StepTotals(1, 1), gw.LossConfig(kl=0.5))
    assert parts["kl"].item() == 3
    loss.backward()
    assert_close(logp.grad, torch.tensor([[1.5, 0.0]]))


def test_rollouts_without_any_step_reward_are_missing_and_too_many_stop_the_run():
    """As when the service that judges steps is down."""
    nothing = gw.RewardTerms({"outcome": OUTCOME}, per_decision={"step": torch.full_like(STEPS, math.nan)})
    with pytest.raises(gw.UserError, match="4 of 4"):
        weigh(nothing, gw.RewardConfig())
    assert weigh(nothing, gw.RewardConfig(weights={"step": 0.0})).missing == 0
