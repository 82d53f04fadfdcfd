"""Out of memory by the device's own limit, recovered with the same gradient; its memory measured and planned for."""

import gc
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from processes import ENVIRONMENT

from accelerator.steps import small_recipe, weights_of
from accelerator.worst_case import PLANNED
from groupwise.memory.measure import device_bytes, used_bytes
from groupwise.training import update
from groupwise.training.evaluate import held_out_metrics
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
    gc.collect()  # what other tests have left would count as memory that this one may use
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


LIMITED = {"rollout": "rows_per_pass", "forward": "rows_per_pass", "backward": "rows_per_pass"}
LIMITED |= {"optimizer": "rows_per_pass", "decoding": "encode_rows", "evaluation": "eval_rows"}
"""What is halved when memory runs out in a stage; decoding is that of latents for their rewards."""


class FullOnce:
    """Leaves the device no memory within one stage, until its row limit has been halved."""

    def __init__(self, setup, counters, stage: str):
        self.limits, self.counters, self.name = setup.state.row_limits, counters, LIMITED[stage]
        self.most = self.limits[self.name]
        self.seen = 0

    def __call__(self) -> None:
        full = self.limits[self.name] >= self.most
        self.seen += full
        self.counters.set_memory_limit(self.counters.counters()["live_bytes"] + 1 if full else 0)

    def around(self, function):
        def called(*arguments, **named):
            self()
            return function(*arguments, **named)

        return called


def fill(stage: str, full: FullOnce, workload, monkeypatch) -> None:
    """Make the device full when the stage begins."""
    if stage == "rollout":
        monkeypatch.setattr(workload, "rollout", full.around(workload.rollout))
    elif stage == "forward":
        monkeypatch.setattr(workload, "score_parts", full.around(workload.score_parts))
    elif stage == "backward":
        monkeypatch.setattr(torch.Tensor, "backward", full.around(torch.Tensor.backward))
    elif stage == "optimizer":
        monkeypatch.setattr(update, "reserve_optimizer_memory", full.around(update.reserve_optimizer_memory))
    else:
        monkeypatch.setattr(workload, "decode", full.around(workload.decode))


@pytest.fixture(scope="module")
def unlimited():
    """A step of flow with memory to spare: made once, on the device."""
    return {}


def small_flow(device):
    return replace(small_recipe("flow", device=device.type), rows_per_pass=16)


@pytest.mark.device
@pytest.mark.parametrize("stage", ["rollout", "forward", "backward", "optimizer", "decoding"])
def test_memory_may_run_out_in_any_stage_of_a_step(device, counters, monkeypatch, unlimited, stage):
    if not unlimited:
        free = set_up(small_flow(device))
        unlimited.update(norm=train_step(free).metrics["grad_norm"], weights=weights_of(free))
    setup = set_up(small_flow(device))
    full = FullOnce(setup, counters, stage)
    fill(stage, full, setup.workload, monkeypatch)
    metrics = train_step(setup).metrics
    assert full.seen >= 1
    assert metrics["oom_retries"] >= 1
    assert setup.state.row_limits[full.name] < full.most
    assert metrics["grad_norm"] == pytest.approx(unlimited["norm"], rel=1e-4)
    pairs = [(own, unlimited["weights"][key]) for key, own in weights_of(setup).items()]
    assert torch.cat([(own - other).abs().flatten() for own, other in pairs]).mean() < 1e-7


@pytest.mark.device
def test_memory_may_run_out_in_an_evaluation(device, counters, monkeypatch):
    setup = set_up(small_recipe("chat", device=device.type))
    expected = held_out_metrics(setup)
    full = FullOnce(setup, counters, "evaluation")
    monkeypatch.setattr(setup.workload, "evaluate", full.around(setup.workload.evaluate))
    assert setup.recovery.retry_smaller("evaluation", held_out_metrics, setup) == pytest.approx(expected, rel=1e-4)
    assert (full.seen, setup.recovery.oom_retries) == (1, 1)
    assert setup.state.row_limits["eval_rows"] == full.most // 2


@pytest.mark.device
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_is_within_a_tenth_of_what_the_device_counts(counters, name):
    command = [sys.executable, "-m", "accelerator.worst_case", name, "small"]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    peaks = json.loads(ended.stdout)
    assert max(peaks["planned"].values()) == pytest.approx(max(peaks["measured"].values()), rel=0.1)


def test_used_and_total_memory_are_those_of_the_device(device, counters):
    before, held = used_bytes(device), torch.zeros(1 << 18, device=device)
    assert used_bytes(device) - before == held.nbytes
    counters.set_memory_limit(1 << 30)
    assert device_bytes(device) == 1 << 30


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
