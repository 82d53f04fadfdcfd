"""The gradient of whole updates against a loop that follows the definitions, rollout by rollout."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from fakes import TinyConfig, recipe
from test_update import one_step
from torch.testing import assert_close

from groupwise.core.config import AdvantageConfig, LossConfig, RewardConfig
from groupwise.training.update import update

CONFIGS = [
    LossConfig(
        kind=kind, ratio=ratio, clip_low=0.05, clip_high=0.3, denominator=denominator, constant=constant, **extra
    )
    for kind, ratio in [
        ("clipped", "decision"),
        ("clipped", "rollout"),
        ("policy_gradient", "decision"),
        ("ranking", "decision"),
    ]
    for denominator, constant in [("decisions", None), ("rollouts", None), ("constant", 40.0)]
    for extra in [{}, {"kl": 0.3, "entropy": 0.2}]
]


def defined_loss(batch, advantages, scores, loss):
    """The definitions, with Python's loops over rows and decisions and torch only for the graph."""
    rollouts, rewards, trained = batch.rollouts, batch.rewards.total, advantages.trained
    rows = [row for row in range(len(rollouts)) if trained[row] and rollouts.mask[row].any()]
    positions = {row: [d for d in range(rollouts.mask.shape[1]) if rollouts.mask[row, d]] for row in rows}
    decisions = sum(len(indices) for indices in positions.values())
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        share = {"decisions": decisions, "rollouts": len(positions[row]) * len(rows), "constant": loss.constant}[
            loss.denominator
        ]
        changes = [scores.logp[row, d] - rollouts.logp[row, d] for d in positions[row]]
        for d, change in zip(positions[row], changes, strict=True):
            a = advantages.values[row].item()
            if loss.kind == "clipped":
                ratio = torch.exp(sum(changes) / len(changes) if loss.ratio == "rollout" else change)
                total = total - torch.minimum(ratio * a, ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high) * a) / share
            elif loss.kind == "policy_gradient":
                total = total - scores.logp[row, d] * a / share
            gap = scores.reference_logp[row, d] - scores.logp[row, d]
            total = total + loss.kl * (gap.exp() - gap - 1) / share - loss.entropy * scores.entropy[row, d] / share
    if loss.kind == "ranking":
        pairs = [
            (i, j)
            for i, j in itertools.permutations(rows, 2)
            if rollouts.group_ids[i] == rollouts.group_ids[j] and rewards[i] > rewards[j]
        ]
        logp = {row: sum(scores.logp[row, d] for d in positions[row]) for row in rows}
        total = total + sum(torch.log(1 + torch.exp(logp[j] - logp[i])) for i, j in pairs) / len(pairs)
    return total


@pytest.mark.parametrize("loss", CONFIGS, ids=lambda loss: f"{loss.kind} {loss.ratio} {loss.denominator} kl={loss.kl}")
def test_the_third_update_has_the_gradient_of_the_definitions(loss):
    config = replace(
        recipe(),
        loss=loss,
        workload=TinyConfig(missing_member=2, flat_below=8),
        reward=RewardConfig(max_missing_fraction=0.5),
        advantage=AdvantageConfig(kind="centered"),
    )
    gradients = {}
    for updates in (2, 3):
        steady = replace(
            config.optimizer, updates_per_step=updates, max_grad_norm=None, schedule="constant", learning_rate=0.1
        )
        limited = replace(config, optimizer=steady)
        setup, batch, advantages = one_step(limited)
        batch.rollouts.mask[5] = False  # a rollout without a decision
        update(setup, batch, advantages)
        gradients[updates] = [parameter.grad.clone() for parameter in setup.workload.policy.parameters()]
        if updates == 2:  # the weights after two updates are those that the third one differentiates at
            total = defined_loss(batch, advantages, setup.workload.score(batch.rollouts), loss)
            expected = torch.autograd.grad(total, list(setup.workload.policy.parameters()))
    assert max(gradient.abs().max() for gradient in expected) > 1e-3
    assert not math.isnan(total.item())
    assert_close(gradients[3], list(expected), rtol=0, atol=1e-12)


def test_ranking_pays_no_forward_pass_for_groups_without_spread_on_later_updates_either():
    config = replace(recipe(), loss=LossConfig(kind="ranking"), workload=TinyConfig(flat_below=20))
    setup, batch, advantages = one_step(config)
    scored, score = [], setup.workload.score
    setup.workload.score = lambda part: scored.append(part.data["condition"]) or score(part)
    update(setup, batch, advantages)
    assert (batch.rollouts.data["condition"] < 20).any()
    assert not (torch.cat(scored) < 20).any()
