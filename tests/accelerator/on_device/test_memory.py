"""Out of memory by the device's own limit, recovered with the same gradient; its memory measured and planned for."""

from dataclasses import replace

import pytest
import torch

from accelerator.steps import small_recipe, weights_of
from groupwise.training.loop import train_step
from groupwise.training.setup import set_up


def lower_limit(setup, base: int, peak: int) -> int:
    """Less than the peak, but enough for gradients, the optimizer's state and its temporary."""
    trained = sum(weight.numel() * weight.element_size() for weight in setup.state.trainable)
    limit = base + max(int(0.8 * (peak - base)), int(5.6 * trained))
    assert limit < 0.97 * peak
    return limit


@pytest.mark.parametrize("name", ["chat", pytest.param("flow", marks=pytest.mark.device)])
def test_out_of_memory_is_recovered_with_the_same_update(device, counters, name):
    config = replace(small_recipe(name, device=device.type), rows_per_pass=32)
    free = set_up(config)
    base = torch.accelerator.memory_allocated(device)
    counters.reset_counters()
    expected = train_step(free)
    peak = counters.counters()["peak_bytes"]
    weights = weights_of(free)
    assert expected.metrics["oom_retries"] == 0
    assert expected.memory.peak == peak  # the monitor reads the device
    assert expected.memory.device >= expected.memory.peak
    limit = lower_limit(free, base, peak)
    del free
    limited = set_up(config)
    counters.set_memory_limit(limit)
    actual = train_step(limited)
    assert actual.metrics["oom_retries"] > 0
    assert actual.memory.peak <= actual.memory.device < peak
    assert actual.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-4)
    differences = torch.cat([(own - weights[key]).abs().flatten() for key, own in weights_of(limited).items()])
    assert differences.mean() < 1e-7


@pytest.mark.device
def test_rows_per_pass_auto_fits_the_device(device, counters):
    config = replace(small_recipe("chat", device=device.type), rows_per_pass="auto")
    everything = set_up(config)
    assert everything.shape.rows_per_pass == 32
    base = torch.accelerator.memory_allocated(device)
    counters.reset_counters()
    train_step(everything)
    limit = lower_limit(everything, base, counters.counters()["peak_bytes"])
    del everything
    counters.set_memory_limit(limit)
    fitting = set_up(config)
    assert 1 <= fitting.shape.rows_per_pass < 32
    assert train_step(fitting).metrics["oom_retries"] == 0
