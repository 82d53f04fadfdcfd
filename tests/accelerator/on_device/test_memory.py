"""Out of memory by the device's own limit, recovered with the same gradient; its memory measured and planned for."""

import gc
from dataclasses import replace

import pytest
import torch

from accelerator.steps import small_recipe, weights_of
from groupwise.training.loop import train_step
from groupwise.training.setup import set_up


def small(name: str, device: torch.device, rows_per_pass):
    """With an adapter in chat: of so small a model gradients and optimizer would need more than a pass."""
    config = replace(small_recipe(name, device=device.type), rows_per_pass=rows_per_pass)
    if name != "chat":
        return config
    policy = replace(config.workload.policy, lora_rank=4)
    return replace(config, workload=replace(config.workload, policy=policy))


@pytest.mark.device
@pytest.mark.parametrize("name", ["chat", "flow"])
def test_out_of_memory_is_recovered_with_the_same_update(device, counters, name):
    config = small(name, device, 32)
    free = set_up(config)
    base = torch.accelerator.memory_allocated(device)
    counters.reset_counters()
    expected = train_step(free)
    peak = counters.counters()["peak_bytes"]
    weights = weights_of(free)
    assert expected.metrics["oom_retries"] == 0
    assert expected.memory.peak == peak  # the monitor reads the device
    assert expected.memory.device >= expected.memory.peak
    limit = base + int(0.8 * (peak - base))
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
    config = small("chat", device, "auto")
    everything = set_up(config)
    assert everything.shape.rows_per_pass == 32
    base = torch.accelerator.memory_allocated(device)
    counters.reset_counters()
    train_step(everything)
    limit = base + int(0.8 * (counters.counters()["peak_bytes"] - base))
    del everything
    counters.set_memory_limit(limit)
    fitting = set_up(config)
    assert 1 <= fitting.shape.rows_per_pass < 32
    assert train_step(fitting).metrics["oom_retries"] == 0


@pytest.mark.device
def test_offloaded_moments_leave_the_device_and_the_update_is_the_same(device, counters):
    config = replace(small_recipe("chat", device=device.type), rows_per_pass=8)
    weights, held = [], []
    for offload in (False, True):
        setup = set_up(replace(config, optimizer=replace(config.optimizer, offload=offload)))
        base = torch.accelerator.memory_allocated(device)
        train_step(setup)
        setup.state.optimizer.zero_grad(set_to_none=True)
        moments = [state["exp_avg"] for state in setup.state.optimizer.state.values()]
        assert {moment.device.type for moment in moments} == {"cpu" if offload else device.type}
        weights.append(weights_of(setup))
        trained = sum(weight.nbytes for weight in setup.state.trainable)
        held.append(torch.accelerator.memory_allocated(device) - base)
        del moments, setup
        gc.collect()
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weight) for name, weight in weights[1].items())
    assert held[0] - held[1] == pytest.approx(2 * trained, rel=0.05)
