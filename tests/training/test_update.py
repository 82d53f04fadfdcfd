from dataclasses import replace

import pytest
import torch
from fakes import TinyConfig, recipe
from torch.testing import assert_close

from groupwise.core.advantage import group_advantages
from groupwise.core.config import AdvantageConfig, LossConfig
from groupwise.core.errors import UserError
from groupwise.core.loss import pairwise_ranking
from groupwise.core.placement import place
from groupwise.core.reward import weigh
from groupwise.dist.comm import connect
from groupwise.training.rollout import Round, compute_rewards, generate_rollouts
from groupwise.training.run import set_up
from groupwise.training.state import trainable_weights
from groupwise.training.update import _all_finite, update

LOSSES = {
    "clipped": LossConfig(kl=0.1, entropy=0.02),
    "per rollout": LossConfig(ratio="rollout", denominator="rollouts", clip_low=0.3, clip_high=0.4),
    "constant": LossConfig(denominator="constant", constant=50.0, kl=0.1),
    "policy gradient": LossConfig(kind="policy_gradient"),
    "ranking": LossConfig(kind="ranking"),
}


def one_step(config, *, step=0):
    """The setup, the round of this step, and its advantages."""
    setup = set_up(config)
    placement = place(setup.shape, seed=config.seed, step=step)
    rollouts = generate_rollouts(setup, placement)
    rewards = weigh(compute_rewards(setup, rollouts), config.reward)
    advantages = group_advantages(rewards.total, rollouts.group_ids, config.advantage)
    return setup, Round(placement, rollouts, rollouts.group_ids, rewards), advantages


def gradient_of(config) -> torch.Tensor:
    """What one update with a learning rate of almost nothing leaves in the gradients, all in one vector."""
    setup, batch, advantages = one_step(config)
    update(setup, batch, advantages)
    return torch.cat([weight.grad.flatten() for weight in trainable_weights(setup.workload.policy).values()])


def changed(config, *, optimizer=None, **fields):
    return replace(config, optimizer=replace(config.optimizer, **(optimizer or {})), **fields)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("updates", [1, 3])
def test_every_pass_size_gives_the_same_gradient(loss, updates):
    config = changed(recipe(), loss=loss, optimizer={"updates_per_step": updates, "max_grad_norm": None})
    config = replace(
        config,
        workload=TinyConfig(missing_member=2, flat_below=10),
        reward=replace(config.reward, max_missing_fraction=0.5),
    )
    whole = gradient_of(replace(config, rows_per_pass=32))
    assert whole.abs().max() > 1e-3
    for rows in (1, 3, 4, 7, 16, 1000):
        assert_close(gradient_of(replace(config, rows_per_pass=rows)), whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("updates", [1, 3])
def test_backward_decision_by_decision_gives_the_same_gradient(loss, updates):
    """In float64, with ragged rows, and with ratios away from 1 after the first of three updates."""
    config = changed(recipe(), loss=loss, optimizer={"updates_per_step": updates, "max_grad_norm": None})
    whole, apart = (gradient_of(replace(config, workload=TinyConfig(score_by_decision=by))) for by in (False, True))
    assert whole.abs().max() > 1e-3
    assert_close(apart, whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("step", "weight"), [(0, 0.2), (2, 0.15), (8, 0.0)])
def test_the_entropy_bonus_falls_in_a_straight_line(step, weight):
    assert LossConfig(entropy=0.2, entropy_end=0.0).entropy_at(step / 8) == pytest.approx(weight)
    falling, steady = (
        changed(recipe(), steps=8, loss=loss, optimizer={"max_grad_norm": None, "updates_per_step": 1})
        for loss in (LossConfig(entropy=0.2, entropy_end=0.0), LossConfig(entropy=weight))
    )
    gradients = []
    for config in (falling, steady):
        setup, batch, advantages = one_step(config)
        setup.state.step = step
        update(setup, batch, advantages)
        gradients.append(
            torch.cat([weight.grad.flatten() for weight in trainable_weights(setup.workload.policy).values()])
        )
    assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("end", [-0.1, 0.3])
def test_an_entropy_bonus_that_would_rise_is_refused(end):
    with pytest.raises(UserError, match=r"loss\.entropy_end"):
        LossConfig(entropy=0.2, entropy_end=end)


@pytest.mark.parametrize("kind", ["group_std", "batch_std", "centered", "leave_one_out"])
def test_groups_without_spread_change_nothing_but_are_counted(kind):
    config = changed(
        recipe(),
        workload=TinyConfig(flat_below=20),
        advantage=AdvantageConfig(kind=kind),
        optimizer={"max_grad_norm": None, "updates_per_step": 1},
    )
    setup, batch, advantages = one_step(config)
    flat = batch.rollouts.data["condition"] < 20
    assert flat.any()
    assert not advantages.trained[flat].any()
    scored = []
    score = setup.workload.score
    setup.workload.score = lambda part: scored.append(part.data["condition"]) or score(part)
    update(setup, batch, advantages)
    assert not (torch.cat(scored) < 20).any(), "a group without spread paid for a forward pass"


def test_a_step_without_any_spread_changes_no_weight_not_even_by_momentum():
    config = changed(recipe(), optimizer={"weight_decay": 0.1})
    setup, batch, advantages = one_step(config)
    update(setup, batch, advantages)
    before = {name: weight.clone() for name, weight in trainable_weights(setup.workload.policy).items()}
    flat = replace(batch.rewards, total=torch.ones_like(batch.rewards.total))
    metrics = update(setup, replace(batch, rewards=flat), group_advantages(flat.total, batch.group_ids))
    assert metrics == {"trained_rollouts": 0.0}
    for name, weight in trainable_weights(setup.workload.policy).items():
        assert torch.equal(weight, before[name])


def test_the_first_ratio_is_one_and_later_ones_are_not():
    metrics = {}
    for updates in (1, 2):
        config = changed(recipe(), optimizer={"updates_per_step": updates})
        setup, batch, advantages = one_step(config)
        metrics[updates] = update(setup, batch, advantages)
    assert metrics[1]["ratio_max"] == metrics[1]["ratio_min"] == 1
    assert metrics[2]["ratio_max"] > 1.01


def test_ranking_has_the_gradient_of_the_loss_over_all_members_at_once():
    config = changed(
        recipe(), loss=LossConfig(kind="ranking"), optimizer={"updates_per_step": 1, "max_grad_norm": None}
    )
    setup, batch, _ = one_step(config)
    rollouts, rewards = batch.rollouts, batch.rewards.total
    logp = setup.workload.score(rollouts).logp
    rows = torch.where(rollouts.mask, logp, torch.zeros_like(logp)).sum(1)
    pairs = sum(
        int(rewards[i] > rewards[j]) * int(rollouts.group_ids[i] == rollouts.group_ids[j])
        for i in range(32)
        for j in range(32)
    )
    loss = pairwise_ranking(rows, rewards, rollouts.group_ids, denominator=float(pairs))
    expected = torch.autograd.grad(loss, list(setup.workload.policy.parameters()))
    gradient = gradient_of(config)
    assert_close(gradient, torch.cat([part.flatten() for part in expected]), rtol=0, atol=1e-12)


def test_gradients_are_scaled_down_to_the_limit():
    norms = {limit: gradient_of(changed(recipe(), optimizer={"max_grad_norm": limit})).norm() for limit in (None, 0.01)}
    assert norms[None] > 0.02
    assert norms[0.01].item() == pytest.approx(0.01, rel=1e-3)


def test_one_process_is_one_rank():
    comm = connect()
    assert (comm.rank, comm.ranks, comm.is_main) == (0, 1, True)
    assert comm.sum(1.5, 2) == [1.5, 2.0]


def test_weights_whose_norm_overflows_are_finite_and_others_are_not():
    fine, huge = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.full((4,), 1e30))
    assert _all_finite([fine, huge])
    for wrong in (torch.nan, torch.inf, -torch.inf):
        assert not _all_finite([fine, torch.nn.Parameter(torch.tensor([1.0, wrong]))])
