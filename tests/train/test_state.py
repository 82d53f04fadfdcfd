import math

import pytest
import torch
from torch import nn

from groupwise.core.errors import UserError
from groupwise.train.config import OptimiserConfig
from groupwise.train.state import Ema, learning_rate, new_state, trainable_weights


def test_schedules_by_hand():
    linear = OptimiserConfig(learning_rate=1.0, schedule="linear", warmup_updates=2)
    assert [learning_rate(linear, update, 6) for update in range(6)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = OptimiserConfig(learning_rate=2.0, schedule="cosine")
    assert learning_rate(cosine, 1, 4) == pytest.approx(1 + math.cos(math.pi / 4))
    assert learning_rate(OptimiserConfig(learning_rate=0.3), 99, 100) == 0.3


def test_the_average_by_hand():
    policy = nn.Linear(1, 1, bias=False)
    nn.init.constant_(policy.weight, 1.0)
    ema = Ema(0.75, {"weight": policy.weight.detach().clone()})
    nn.init.constant_(policy.weight, 5.0)
    ema.follow(policy)
    assert ema.average["weight"].item() == 2.0  # 0.75 x 1 + 0.25 x 5


def test_evaluation_borrows_the_average_and_leaves_the_policy_as_it_was():
    policy = nn.Linear(3, 2)
    state = new_state(policy, OptimiserConfig(ema_decay=0.5))
    kept = {name: weight.clone() for name, weight in trainable_weights(policy).items()}
    average = {name: value.add_(1).clone() for name, value in state.ema.average.items()}

    def evaluation_that_writes_and_breaks():
        with state.ema.borrowed(policy):
            for name, weight in trainable_weights(policy).items():
                assert torch.equal(weight, average[name])
                weight.data.mul_(3)
            raise RuntimeError("evaluation broke")

    with pytest.raises(RuntimeError, match="evaluation broke"):
        evaluation_that_writes_and_breaks()
    for name, weight in trainable_weights(policy).items():
        assert torch.equal(weight, kept[name])
        assert torch.equal(state.ema.average[name], average[name])


def test_a_frozen_policy_is_refused():
    with pytest.raises(UserError, match="nothing to train"):
        new_state(nn.Linear(1, 1).requires_grad_(False), OptimiserConfig())
