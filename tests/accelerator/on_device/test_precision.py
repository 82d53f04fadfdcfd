"""Precision on the device: ratio 1 before the first update in bfloat16, and float64 equal to the CPU's to 1e-12."""

from dataclasses import replace

import pytest
import torch
from tiny.llama import llama, ragged_prompts, rows_for
from tiny.pipelines import config_of, save_pipeline

import groupwise as gw
from accelerator.steps import small_recipe
from groupwise.dist.devices import move_module, require_dtype
from groupwise.training.loop import train_step
from groupwise.training.preflight import RATIO_TOLERANCE, preflight
from groupwise.training.setup import set_up
from groupwise.workloads.chat.config import PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.generate import generate
from groupwise.workloads.chat.engine.policy import make_policy
from groupwise.workloads.chat.engine.score import score

TOLERANCE = {"chat": 0.1, "flow": 1e-3, "controller": 1e-3}
"""Largest difference of a log-probability, sampled and recomputed, with products in bfloat16 (law 4). In chat a token
is sampled in one shape and scored in another; flow and the controller compute both alike, so theirs is float32's."""


def in_bfloat16(name: str, device: torch.device, folder) -> gw.Config:
    if name == "flow":
        workload = config_of(save_pipeline("sd3", folder), "sd3", dtype="bfloat16")
        run = gw.RunConfig(device=device.type, preflight=True)
        return gw.Config(workload, steps=2, conditions_per_step=2, group_size=4, rows_per_pass=3, run=run)
    config = small_recipe(name, device=device.type)
    if name == "chat":
        policy = replace(config.workload.policy, dtype="bfloat16")
        return replace(config, workload=replace(config.workload, policy=policy))
    return config


@pytest.mark.device
@pytest.mark.parametrize("name", TOLERANCE)
def test_ratio_is_one_with_products_in_bfloat16_and_weights_and_optimizer_in_float32(device, name, tmp_path):
    setup = set_up(in_bfloat16(name, device, tmp_path))
    if name == "controller":  # the frozen model: the embedded one comes in float32
        setup.workload.task.executor.adapter.model.to(torch.bfloat16)
    dtypes = [torch.float32] + [torch.bfloat16] * (name == "chat")
    assert TOLERANCE[name] == max(RATIO_TOLERANCE[dtype] for dtype in dtypes)  # what preflight allows
    ratio = next(check for check in preflight(setup) if check.name.startswith("ratio"))
    assert ratio.passed, ratio.detail
    metrics = train_step(setup).metrics
    for extreme in ("ratio_min", "ratio_max"):
        assert metrics[extreme] == pytest.approx(1, abs=TOLERANCE[name])
    moments = [state["exp_avg"] for state in setup.state.optimizer.state.values()]
    assert {tensor.dtype for tensor in (*setup.state.trainable, *moments)} == {torch.float32}


def test_float64_is_the_cpus_to_the_twelfth_digit(device):
    require_dtype(device, "float64", "policy.dtype")
    prompts, of_row = ragged_prompts(3), [0, 0, 1, 1, 2, 2]
    sampling, results = SamplingParams(max_new_tokens=12, stop_token_ids=(5,)), []
    for where in (torch.device("cpu"), device):
        policy = make_policy(move_module(llama().double(), where), PolicyConfig("tiny", dtype="float64"))
        assert policy.shares_prefix
        completions = generate(policy, prompts, of_row, rows_for(3, 2), sampling, decode_rows=4)
        scores = score(policy, prompts, of_row, completions, sampling)
        scores.logp.sum().backward()
        gradient = torch.cat([weight.grad.cpu().flatten() for weight in policy.parameters()])
        results.append(([completion.ids for completion in completions], scores.logp.detach().cpu(), gradient))
    (ids, logp, gradient), (other_ids, other_logp, other_gradient) = results
    assert ids == other_ids
    torch.testing.assert_close(logp, other_logp, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, other_gradient, rtol=1e-12, atol=1e-12 * float(gradient.abs().max()))
