"""Fake tensors take no memory; a traced update counts what AdamW holds."""

from dataclasses import replace

import pytest
import torch
from allocator import peak_allocated

from groupwise.core.shape import StepShape
from groupwise.dist.comm import Comm
from groupwise.memory.stages import StepSpec, WeightBytes, peak_of_update
from groupwise.memory.trace import LiveByteCounter, TracedStep, fake_tensors, trace_step, trace_update
from groupwise.training.config import Config, OptimizerConfig
from groupwise.training.state import create_state
from groupwise.training.update import _apply

SPEC = StepSpec(StepShape(10**6, 2, 4, 1, 4, "whole"), fused_optimizer=True)


def test_a_sum_by_hand():
    with LiveByteCounter() as live:
        first = torch.zeros(100)  # 400 bytes
        second = first + 1  # 800
        del first  # 400
        third = second[:50].clone()  # 600
        assert (live.current, live.peak) == (600, 800)
        view = third.view(5, 10)
        assert live.current == 600, "a view takes nothing"
        del third, view, second
        assert live.current == 0


def test_fake_tensors_take_no_memory():
    def terabyte():
        with fake_tensors():
            return torch.nn.Linear(1 << 19, 1 << 19)

    assert peak_allocated(terabyte) < 1 << 20
    with LiveByteCounter() as live:
        live.include(*terabyte().parameters())
        assert live.peak > 1 << 40


@pytest.mark.parametrize(("fused", "numbers_each"), [(True, 4), (False, 5)])
def test_an_optimizer_that_is_not_fused_holds_one_number_more_of_each(fused, numbers_each):
    policy, parameters = torch.nn.Linear(100, 100), 100 * 101
    spec = replace(SPEC, fused_optimizer=fused)
    peak = trace_update(TracedStep(policy, lambda: policy.weight.sum() + policy.bias.sum()), spec)
    # weights, gradients and two moments of four bytes each; little besides
    assert peak == pytest.approx(4 * numbers_each * parameters, rel=0.02)
    weights = WeightBytes(0, parameters)
    temporaries = {"optimizer temporaries": weights.optimizer_temporaries(spec)}
    planned = peak_of_update(weights.by_part(spec), [{}], temporaries, one_pass=False)
    assert sum(planned.values()) == 4 * numbers_each * parameters


def test_what_a_stage_holds_is_counted_where_it_is_held():
    with fake_tensors():
        policy, frozen, sampled = torch.nn.Linear(100, 100), torch.zeros(10**6), torch.zeros(10**7)

    def forward():
        return policy(torch.zeros(1, 100)).sum()

    peaks = trace_step(TracedStep(policy, forward, forward, held=(frozen,), held_in_rollout=(sampled,)), SPEC)
    assert peaks["rollout"] == pytest.approx(4 * (10**6 + 10**7 + 3 * 10100), rel=0.01)
    assert peaks["update"] == pytest.approx(4 * (10**6 + 4 * 10100), rel=0.01)


def test_the_allocator_has_nothing_to_hand_out_for_a_fused_step():
    config = OptimizerConfig()
    state = create_state(torch.nn.Linear(1000, 1000), config)

    def step():
        for weight in state.trainable:
            weight.grad.fill_(1.0)
        _apply(state, Config(None, steps=1, optimizer=config), 0, Comm(0, 1, torch.device("cpu")))

    for weight in state.trainable:
        weight.grad = torch.zeros_like(weight)
    step()
    assert peak_allocated(step) < 4_000, "of 4 MB of weights"
