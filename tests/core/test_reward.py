import math

import pytest
import torch
from torch import tensor

from groupwise.core.config import RewardConfig
from groupwise.core.errors import UserError
from groupwise.core.reward import term_statistics, weigh
from groupwise.core.types import RewardTerms


def test_weights_by_hand():
    terms = RewardTerms({"right": tensor([1.0, 0.0]), "short": tensor([0.5, 1.0]), "seen": tensor([9.0, 9.0])})
    rewards = weigh(terms, RewardConfig(weights={"short": 2.0, "seen": 0.0}))
    assert rewards.total.tolist() == [2.0, 2.0]


def test_a_missing_term_makes_the_total_missing_unless_it_weighs_nothing():
    terms = RewardTerms({"a": tensor([1.0, 1.0, 1.0, 1.0]), "b": tensor([1.0, math.nan, 1.0, 1.0])})
    rewards = weigh(terms, RewardConfig(max_missing_fraction=0.25))
    assert rewards.total.isnan().tolist() == [False, True, False, False]
    assert rewards.missing == 1
    assert weigh(terms, RewardConfig(weights={"b": 0.0})).missing == 0


def test_an_infinite_reward_is_missing_too():
    assert (
        weigh(RewardTerms({"a": tensor([1.0, 2.0, math.inf, 4.0])}), RewardConfig(max_missing_fraction=0.5)).missing
        == 1
    )


def test_too_many_missing_stop_the_run_with_the_reason():
    terms = RewardTerms({"a": torch.full((4,), math.nan)}, {"a": "raised KeyError: 'answer'"})
    with pytest.raises(UserError, match=r"4 of 4 rollouts .*max_missing_fraction 0.2 .*KeyError: 'answer'"):
        weigh(terms, RewardConfig())


def test_an_unknown_weight_and_no_term_are_refused():
    with pytest.raises(UserError, match=r"'acc', which is not a reward of this workload\. It has: right"):
        weigh(RewardTerms({"right": tensor([1.0])}), RewardConfig(weights={"acc": 1.0}))
    with pytest.raises(UserError, match="no reward term"):
        weigh(RewardTerms({}), RewardConfig())


def test_statistics_are_of_the_rows_that_have_the_term():
    metrics = term_statistics(RewardTerms({"a": tensor([1.0, 3.0, math.nan, math.nan])}))
    assert metrics == {"reward/a": 2.0, "reward/a/std": 1.0, "reward/a/missing_fraction": 0.5}
