import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from groupwise.core.advantage import group_advantages
from groupwise.core.config import AdvantageConfig

KINDS = ("group_std", "batch_std", "centered", "leave_one_out")
NAN = math.nan


def advantages(rewards, ids, kind="group_std", **settings):
    config = AdvantageConfig(kind=kind, eps=0.0, **settings)
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids), config)


def test_by_hand():
    # rewards 1, 3: mean 2, std 1
    assert_close(advantages([1.0, 3.0], [0, 0]).values.tolist(), [-1.0, 1.0])
    assert_close(advantages([1.0, 3.0], [0, 0], "centered").values.tolist(), [-1.0, 1.0])
    # the other member's mean: 1 - 3, 3 - 1
    assert_close(advantages([1.0, 3.0], [0, 0], "leave_one_out").values.tolist(), [-2.0, 2.0])
    # 1, 3 | 5, 9: all have mean 4.5 and variance (12.25 + 2.25 + 0.25 + 20.25) / 4 = 8.75
    expected = [value / math.sqrt(8.75) for value in (-1, 1, -2, 2)]
    assert_close(advantages([1.0, 3.0, 5.0, 9.0], [4, 4, 2, 2], "batch_std").values.tolist(), expected)
    # 0, 0, 3: mean 1, std sqrt(2): 2 / sqrt(2) is clipped to 1
    assert_close(advantages([0.0, 0.0, 3.0], [0, 0, 0], clip=1.0).values.tolist(), [-(0.5**0.5), -(0.5**0.5), 1.0])


FLOW_GRPO = {
    "group_std": (-0.8164299, 0.0, 0.2293105, 0.2293105, 1.6328598, 1.1465526, -0.8164299, -1.6051736),
    "batch_std": (-0.8529240, 0.0, 0.0426462, 0.0426462, 1.7058480, 0.2132310, -0.8529240, -0.2985234),
}
"""What stat_tracking.py of zhtmike/flow_grpo@9745241 gave, the second as global_std; 1e-4 is added to the std."""


@pytest.mark.parametrize("kind", FLOW_GRPO)
def test_advantages_are_those_of_flow_grpo(kind):
    rewards, prompts = torch.tensor([1.0, 2.0, 0.5, 0.5, 4.0, 0.7, 1.0, 0.1]).double(), [0, 0, 1, 1, 0, 1, 0, 1]
    ours = group_advantages(rewards, torch.tensor(prompts), AdvantageConfig(kind=kind, eps=1e-4)).values
    assert_close(ours, torch.tensor(FLOW_GRPO[kind]).double(), rtol=0, atol=1e-6)


@st.composite
def rewarded(draw):
    rows = draw(st.integers(1, 24))
    ids = draw(st.lists(st.sampled_from([-5, 0, 7, 2**62]), min_size=rows, max_size=rows))
    values = st.one_of(st.sampled_from([0.0, 1.0, NAN]), st.floats(-100, 100))
    return draw(st.lists(values, min_size=rows, max_size=rows)), ids


def naive(rewards, ids, kind):
    """The definition, one rollout at a time."""
    present = [r for r in rewards if not math.isnan(r)]
    result = []
    for reward, own in zip(rewards, ids, strict=True):
        group = [r for r, i in zip(rewards, ids, strict=True) if i == own and not math.isnan(r)]
        if math.isnan(reward) or min(group) == max(group):
            result.append(0.0)
            continue
        mean = sum(group) / len(group)
        if kind == "leave_one_out":
            result.append(reward - (sum(group) - reward) / (len(group) - 1))
            continue
        pool = {"group_std": group, "batch_std": present, "centered": None}[kind]
        centre = sum(pool) / len(pool) if pool else 0
        std = math.sqrt(sum((r - centre) ** 2 for r in pool) / len(pool)) if pool else 1.0
        result.append((reward - mean) / (std + 1e-9))
    return result


@pytest.mark.parametrize("kind", KINDS)
@given(rewarded())
def test_agrees_with_a_naive_loop(kind, case):
    rewards, ids = case
    config = AdvantageConfig(kind=kind, eps=1e-9)
    result = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids), config)
    assert_close(result.values.tolist(), naive(rewards, ids, kind), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@given(rewarded(), st.randoms())
def test_order_does_not_matter_and_a_group_sums_to_zero(kind, case, random):
    rewards, ids = case
    order = list(range(len(ids)))
    random.shuffle(order)
    straight = advantages(rewards, ids, kind).values
    shuffled = advantages([rewards[i] for i in order], [ids[i] for i in order], kind).values
    assert_close(shuffled, straight[order])
    for own in set(ids):
        assert straight[torch.tensor(ids) == own].sum().abs() < 1e-6


@given(rewarded())
def test_missing_equals_dropped(case):
    rewards, ids = case
    kept = [row for row, reward in enumerate(rewards) if not math.isnan(reward)]
    whole = advantages(rewards, ids)
    assert not whole.trained[[row for row in range(len(ids)) if row not in kept]].any()
    if kept:
        dropped = advantages([rewards[row] for row in kept], [ids[row] for row in kept])
        assert_close(whole.values[kept], dropped.values)


def test_no_spread_is_equality_not_a_small_std():
    result = advantages([0.1 + 0.2, 0.1 + 0.2, 1.0, 1.0 + 1e-12, 5.0, NAN], [0, 0, 1, 1, 2, 2])
    assert result.trained.tolist() == [False, False, True, True, False, False]
    assert (result.groups, result.zero_spread_groups) == (3, 2)
    assert_close(result.values[2:4].tolist(), [-1.0, 1.0], rtol=1e-3, atol=1e-3)
