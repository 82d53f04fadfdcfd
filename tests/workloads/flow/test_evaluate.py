"""Held-out clips come from noise that is always the same."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from groupwise.workloads.flow.evaluate import generate_held_out
from groupwise.workloads.flow.workload import FlowWorkload
from workloads.flow.small import CPU, SmallConfig, steadiness, warmth


def workload_of(config=None, **task):
    config = config or SmallConfig()
    return FlowWorkload(replace(config.task(CPU), **task), config, CPU)


def metrics_of(workload):
    return workload.summarize_evaluation(workload.evaluate(torch.arange(workload.num_held_out)))


def test_a_clip_depends_on_its_condition_and_the_seed_only():
    clips = generate_held_out(workload_of(), torch.arange(4))
    split = generate_held_out(workload_of(SmallConfig(eval_rows=1)), torch.tensor([3, 1]))
    assert_close(split, clips[[3, 1]], rtol=0, atol=1e-5)
    assert not torch.allclose(generate_held_out(workload_of(SmallConfig(eval_seed=1)), torch.arange(4)), clips)


def test_metrics_by_hand():
    workload = workload_of(weights={"warmth": 2.0}, eval_metrics={"red": lambda prompts, **_: [7.0] * len(prompts)})
    clips, cameras = list(generate_held_out(workload, torch.arange(4))), [c.camera for c in workload.task.held_out]
    means = [sum(values) / 4 for values in (warmth([], clips), steadiness([], clips, cameras))]
    metrics = {"held-out reward": 2 * means[0], "held-out warmth": means[0], "held-out steadiness": means[1]}
    metrics["held-out red"] = 7.0
    assert metrics_of(workload) == pytest.approx(metrics, abs=1e-6)
    workload.row_limits = {**workload.row_limits, "eval_rows": 3}  # clips are judged three at a time
    assert metrics_of(workload) == pytest.approx(metrics, abs=1e-6)


def test_without_weights_terms_stand_alone_and_without_held_out_conditions_there_is_nothing():
    assert set(metrics_of(workload_of(weights={}))) == {"held-out warmth", "held-out steadiness"}
    assert workload_of(held_out=[]).num_held_out == 0


def test_evaluation_may_take_more_steps_than_training():
    plain, more = (generate_held_out(workload_of(SmallConfig(eval_steps=n)), torch.arange(2)) for n in (None, 9))
    nine = replace(SmallConfig().sampling, num_inference_steps=9)
    assert torch.equal(more, generate_held_out(workload_of(SmallConfig(nine)), torch.arange(2)))
    assert not torch.allclose(more, plain)


def test_the_noise_of_evaluation_does_not_depend_on_how_rollouts_share_theirs():
    alone = replace(SmallConfig().sampling, shared_noise=False)
    clips, same = (generate_held_out(workload_of(config), torch.arange(2)) for config in (None, SmallConfig(alone)))
    assert torch.equal(clips, same)
