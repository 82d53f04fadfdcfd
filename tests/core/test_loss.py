import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from groupwise.core import loss as losses
from groupwise.core.types import Rollouts, concatenate_rollouts


def float64(values):
    return tensor(values, dtype=torch.float64)


def random_case(seed: int, rows: int = 6, decisions: int = 5):
    """Log-probabilities, ragged masks and advantages in float64."""
    source = torch.Generator().manual_seed(seed)
    logp = -torch.rand(rows, decisions, generator=source, dtype=torch.float64) * 3
    old = logp + 0.4 * torch.randn(rows, decisions, generator=source, dtype=torch.float64)
    lengths = torch.randint(1, decisions + 1, (rows, 1), generator=source)
    mask = torch.arange(decisions)[None] < lengths
    return logp.requires_grad_(), old, mask, torch.randn(rows, generator=source, dtype=torch.float64)


def test_clipped_by_hand():
    # ratios 1.5 and 0.5 with advantage 1: min(1.5, 1.2) and min(0.5, 0.8); with -1: min(-1.5, -1.2), min(-0.5, -0.8)
    logp, old = float64([[1.5, 0.5]] * 2).log(), float64([[1.0, 1.0]] * 2).log()
    mask = torch.ones(2, 2, dtype=torch.bool)
    result = losses.clipped_surrogate(logp, old, float64([1.0, -1.0]), mask, denominator=4.0)
    assert result.item() == pytest.approx(-(1.2 + 0.5 - 1.5 - 0.8) / 4)
    # geometric mean of 1.5 and 0.5 is sqrt(0.75) = 0.866, inside both clips
    result = losses.clipped_surrogate(logp, old, float64([1.0, -1.0]), mask, denominator=4.0, per_rollout=True)
    assert result.item() == pytest.approx(0.0)
    result = losses.clipped_surrogate(logp[:1], old[:1], float64([1.0]), mask[:1], denominator=2.0, per_rollout=True)
    assert result.item() == pytest.approx(-math.sqrt(0.75))


def test_policy_gradient_and_kl_by_hand():
    mask = tensor([[True, True, False]])
    logp = float64([[-1.0, -2.0, -50.0]])
    assert losses.policy_gradient(logp, float64([0.5]), mask, denominator=2.0).item() == pytest.approx(0.75)
    # log ratios 0 and log 2: exp(x) - x - 1 = 0 and 2 - log 2 - 1
    reference = logp + float64([[0.0, math.log(2), 9.0]])
    result = losses.kl_to_reference(logp, reference, mask, denominator=2.0)
    assert result.item() == pytest.approx((1 - math.log(2)) / 2)


def test_denominators_by_hand():
    mask = tensor([[True, True, False], [True, False, False]])
    settings = {"decisions": 30, "rollouts": 10, "constant": 7.0}
    assert losses.denominators(mask, "decisions", **settings).tolist() == [30, 30]
    assert losses.denominators(mask, "rollouts", **settings).tolist() == [20, 10]
    assert losses.denominators(mask, "constant", **settings).tolist() == [7, 7]


@pytest.mark.parametrize("per_rollout", [False, True])
@given(st.integers(0, 10**6))
def test_clipped_agrees_with_a_naive_loop(per_rollout, seed):
    logp, old, mask, advantages = random_case(seed)
    total = 0.0
    for row in range(len(logp)):
        positions = [d for d in range(logp.shape[1]) if mask[row, d]]
        changes = [(logp[row, d] - old[row, d]).item() for d in positions]
        mean = sum(changes) / len(changes)
        for change in changes:
            ratio = math.exp(mean if per_rollout else change)
            a = advantages[row].item()
            total -= min(ratio * a, min(max(ratio, 0.9), 1.3) * a) / 11
    result = losses.clipped_surrogate(
        logp, old, advantages, mask, denominator=11.0, clip=(0.1, 0.3), per_rollout=per_rollout
    )
    assert result.item() == pytest.approx(total)


@given(st.integers(0, 10**6))
def test_before_the_first_update_all_losses_have_the_policy_gradient(seed):
    logp, _, mask, advantages = random_case(seed)
    plain = torch.autograd.grad(losses.policy_gradient(logp, advantages, mask, denominator=3.0), logp)[0]
    clipped = losses.clipped_surrogate(logp, logp.detach(), advantages, mask, denominator=3.0)
    assert_close(torch.autograd.grad(clipped, logp)[0], plain)


@pytest.mark.parametrize("kind", ["clipped", "rollout", "policy_gradient", "kl"])
@given(st.integers(0, 10**6))
def test_masking_equals_dropping_whatever_the_mask_hides(kind, seed):
    logp, old, mask, advantages = random_case(seed)
    dropped = torch.zeros(len(logp), dtype=torch.bool)
    dropped[::2] = True
    hidden = mask & ~dropped[:, None]

    def value(logp, old, mask, advantages):
        if kind == "kl":
            return losses.kl_to_reference(logp, old, mask, denominator=5.0)
        if kind == "policy_gradient":
            return losses.policy_gradient(logp, advantages, mask, denominator=5.0)
        return losses.clipped_surrogate(logp, old, advantages, mask, denominator=5.0, per_rollout=kind == "rollout")

    poisoned = old.masked_fill(~hidden, math.nan) if kind != "policy_gradient" else old
    masked = value(logp, poisoned, hidden, advantages)
    kept = ~dropped
    assert_close(masked, value(logp[kept], old[kept], mask[kept], advantages[kept]))
    gradient = torch.autograd.grad(masked, logp)[0]
    assert gradient.isfinite().all()
    assert not gradient[~hidden].any()


def test_ranking_by_hand():
    # one pair: -log sigmoid(0 - 1) = log(1 + e)
    logp, rewards, ids = float64([0.0, 1.0]), float64([2.0, 1.0]), tensor([5, 5])
    result = losses.pairwise_ranking(logp, rewards, ids, denominator=1.0)
    assert result.item() == pytest.approx(math.log(1 + math.e))
    # its weight is 1 - sigmoid(-1) = sigmoid(1), up for the better and down for the worse
    weight = 1 / (1 + math.exp(-1))
    assert_close(losses.pairwise_weights(logp, rewards, ids), float64([weight, -weight]))


@given(st.integers(0, 10**6))
def test_ranking_agrees_with_a_naive_loop_and_ties_give_no_pair(seed):
    source = torch.Generator().manual_seed(seed)
    logp = torch.randn(9, generator=source, dtype=torch.float64)
    rewards = torch.randint(0, 3, (9,), generator=source).double()
    rewards[torch.rand(9, generator=source) < 0.2] = math.nan
    ids = torch.randint(0, 3, (9,), generator=source)
    total, pairs = 0.0, 0
    for i, j in itertools.permutations(range(9), 2):
        if ids[i] == ids[j] and rewards[i] > rewards[j]:
            total -= math.log(1 / (1 + math.exp(logp[j] - logp[i])))
            pairs += 1
    assert losses.pairwise_ranking(logp, rewards, ids, denominator=2.0).item() == pytest.approx(total / 2)
    assert losses.count_pairs(rewards, ids) == pairs


@given(st.integers(0, 10**6))
def test_pairwise_weights_are_the_gradient_of_the_ranking_loss(seed):
    source = torch.Generator().manual_seed(seed)
    logp = torch.randn(10, generator=source, dtype=torch.float64, requires_grad=True)
    rewards = torch.randint(0, 4, (10,), generator=source).double()
    ids = torch.randint(0, 3, (10,), generator=source)
    ids[0] = 9  # a group of one: its row in the table is padded, and must not turn into NaN
    loss = losses.pairwise_ranking(logp, rewards, ids, denominator=1.0)
    assert_close(losses.pairwise_weights(logp, rewards, ids), -torch.autograd.grad(loss, logp)[0])


def test_passes_of_different_width_are_put_together():
    narrow = Rollouts(tensor([1]), float64([[-1.0]]), tensor([[True]]), {"text": ["a"], "x": tensor([1])})
    wide = Rollouts(tensor([2]), float64([[-2.0, -3.0]]), tensor([[True, True]]), {"text": ["b"], "x": tensor([2])})
    both = concatenate_rollouts([narrow, wide])
    assert both.mask.tolist() == [[True, False], [True, True]]
    assert both.select(tensor([1])).data["text"] == ["b"]
    assert both.data["x"].tolist() == [1, 2]
