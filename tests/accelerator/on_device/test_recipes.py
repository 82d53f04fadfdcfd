"""Steps of the embedded recipes on the device equal those on the CPU."""

import pytest
import torch

from accelerator.steps import small_recipe, train_steps

TIMES = ("_s", "_ms")


@pytest.mark.parametrize(
    "name",
    ["doors", "chat", *(pytest.param(n, marks=pytest.mark.device) for n in ("flow", "flow-image", "controller"))],
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
