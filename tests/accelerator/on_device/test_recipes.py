"""Steps of the embedded recipes on the device equal those on the CPU; a run there can be resumed and evaluated."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from accelerator.steps import small_recipe, train_steps
from groupwise.training.run import train

TIMES = ("_s", "_ms")


@pytest.mark.parametrize(
    "name", ["doors", "chat", *(pytest.param(n, marks=pytest.mark.device) for n in ("flow", "controller"))]
)
def test_two_steps_are_those_of_the_cpu(device, name):
    here, there = (train_steps(small_recipe(name, device=where)) for where in ("cpu", device.type))
    for expected, actual in zip(here.metrics, there.metrics, strict=True):
        same = {key for key, value in expected.items() if isinstance(value, float) and not key.endswith(TIMES)}
        assert {key: actual[key] for key in same} == pytest.approx(
            {key: expected[key] for key in same}, rel=1e-3, abs=1e-4
        )
    assert here.weights.keys() == there.weights.keys()
    # AdamW divides by the root of the mean square: where a gradient is all rounding, the whole step may differ.
    differences = torch.cat([(there.weights[name] - value).abs().flatten() for name, value in here.weights.items()])
    assert differences.mean() < 1e-7
    assert (differences > 1e-5).double().mean() < 1e-4


@pytest.mark.parametrize(
    "name", ["doors", *(pytest.param(n, marks=pytest.mark.device) for n in ("chat", "flow", "controller"))]
)
def test_a_run_on_the_device_is_resumed_bit_identically_and_evaluated(device, name, tmp_path, capsys):
    config = small_recipe(name, device=device.type)
    config = replace(config, run=replace(config.run, run_dir=tmp_path / "run"))
    train(config)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    finished = load_file(checkpoints[-1] / "policy.safetensors")
    shutil.rmtree(checkpoints[-1])
    summary = train(replace(config, run=replace(config.run, resume=True)))
    assert summary.steps == 2
    resumed = load_file(checkpoints[-1] / "policy.safetensors")
    assert all(torch.equal(resumed[key], finished[key]) for key in finished)
