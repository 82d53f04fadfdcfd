"""Stages by hand with a fake clock, and hooks that are removed again."""

import time

import pytest
import torch
from tiny.llava import OPTIONS, llava_olmoe, sample
from torch import nn
from transformers import SiglipVisionConfig, SiglipVisionModel

from groupwise.core.errors import UserError
from groupwise.latency.meter import LatencyMeter, ModelParts, find_model_parts
from groupwise.latency.records import Timing, summarize
from groupwise.workloads.controller.model.adapters import adapter_for
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor


class Bench:
    """A model whose parts take known milliseconds, on a device that works on while the caller goes ahead."""

    def __init__(self):
        self.now_ms, self.queued_ms = 0.0, 0.0
        part = self.part
        self.parts = ModelParts(
            {"tower": part(5), "projector": part(1)}, part(2), (part(10), part(20)), part(3), part(4)
        )

    def part(self, ms: float) -> nn.Module:
        module = nn.Module()
        module.forward = lambda: self.queue(ms)
        return module

    def queue(self, ms: float) -> None:
        self.queued_ms += ms

    def synchronize(self, device: torch.device | None = None) -> None:
        self.now_ms, self.queued_ms = self.now_ms + self.queued_ms, 0.0

    def clock(self) -> float:
        return self.now_ms / 1000

    def text_pass(self) -> None:
        for module in (self.parts.embedding, *self.parts.blocks, self.parts.norm, self.parts.head):
            module()

    def answer(self, tokens: int) -> None:
        self.queue(100)  # before vision
        self.parts.vision["tower"]()
        self.queue(0.5)  # between tower and projector
        self.parts.vision["projector"]()
        self.text_pass()
        for _ in range(tokens - 1):
            self.queue(7)
            self.text_pass()
        self.queue(1000)  # after the last logits


@pytest.fixture
def bench(monkeypatch):
    bench = Bench()
    monkeypatch.setattr(torch.accelerator, "synchronize", bench.synchronize)
    return bench


def meter_of(bench: Bench) -> LatencyMeter:
    return LatencyMeter(bench.parts, torch.device("cuda", 0), clock=bench.clock)


def test_every_millisecond_belongs_to_one_stage(bench):
    timing = meter_of(bench).time(lambda: bench.answer(3))
    # A pass of text is 2 + 10 + 20 + 3 + 4 = 39.
    assert timing.stages_ms == pytest.approx(
        {"vision": 5 + 1, "prefill": 100 + 0.5 + 39, "decode": 2 * (7 + 39) + 1000}
    )
    assert timing.decode_steps_ms == pytest.approx((46, 46))
    assert timing.decode_steps == 2
    assert timing.total_ms == pytest.approx(sum(timing.stages_ms.values()))


def test_one_token_has_no_decode(bench):
    timing = meter_of(bench).time(lambda: bench.answer(1))
    assert timing.stages_ms == pytest.approx({"vision": 6, "prefill": 1139.5, "decode": 0})
    assert timing.decode_steps == 0


def test_quantiles_by_hand():
    stages = [{"vision": 0.0, "prefill": ms, "decode": 0.0} for ms in (10.0, 30.0, 20.0, 50.0, 40.0)]
    summary = summarize([Timing(stages_ms, stages_ms["prefill"]) for stages_ms in stages])
    # 10, 20, 30, 40, 50: quarters at 20 and 40; p95 lies 0.8 of the way from the fourth to the fifth.
    assert (summary.total.p50_ms, summary.total.p95_ms, summary.total.iqr_ms) == pytest.approx((30, 48, 20))
    assert summary.stages["prefill"] == summary.total
    assert (summary.runs, summary.decode_step) == (5, None)


def hooks_on(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_no_hook_is_left_even_after_an_error():
    model = llava_olmoe()
    meter, before = LatencyMeter(find_model_parts(model)), hooks_on(model)
    seen = []

    def fail():
        seen.append(hooks_on(model))
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        meter.time(fail)
    assert seen[0] > before
    assert hooks_on(model) == before
    meter.time(lambda: None)
    assert hooks_on(model) == before


def test_stages_add_up_to_the_total_of_an_independent_clock():
    model = llava_olmoe()
    executor, meter = Executor(adapter_for(model), OPTIONS), LatencyMeter(find_model_parts(model))
    shares = []
    for _ in range(5):  # the best of five: anything may come between two readings of a clock
        took = []

        def answer(took=took):
            begun = time.perf_counter()
            executor.answer([AnswerRequest(sample(1), OPTIONS.full)], max_new_tokens=3)
            took.append(1000 * (time.perf_counter() - begun))

        timing = meter.time(answer)
        shares.append(abs(sum(timing.stages_ms.values()) / took[0] - 1))
    assert min(shares) < 0.05


def test_measuring_costs_less_than_a_hundredth():
    """Cost of one event, by many of them on a head that does nothing, times the events of a real answer."""
    model = llava_olmoe()
    parts, nothing = find_model_parts(model), nn.Identity()
    events, idle = 2 * len(parts.vision) + 3, ModelParts({}, nothing, (nothing,), nothing, nothing)

    def cpu_seconds(act, times):
        return min(_cpu_seconds(act) for _ in range(times))

    calls, empty = 2000, torch.empty(0)
    plain = cpu_seconds(lambda: [nothing(empty) for _ in range(calls)], 5)
    hooked = cpu_seconds(lambda: LatencyMeter(idle).time(lambda: [nothing(empty) for _ in range(calls)]), 5)
    meter, executor = LatencyMeter(parts), Executor(adapter_for(model), OPTIONS)
    set_up = cpu_seconds(lambda: meter.time(lambda: None), 20)
    answer = cpu_seconds(lambda: executor.answer([AnswerRequest(sample(1), OPTIONS.full)], max_new_tokens=3), 5)
    overhead = (events * (hooked - plain) / calls + set_up) / answer
    assert overhead < 0.01, f"{overhead:.2%}"


def _cpu_seconds(act) -> float:
    begun = time.process_time()
    act()
    return time.process_time() - begun


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Linear(2, 2), "latency of Linear cannot be measured: it has no embedding or blocks or norm or head"),
        (
            SiglipVisionModel(
                SiglipVisionConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
            ),
            "latency of SiglipVisionModel cannot be measured",
        ),
        (llava_olmoe().model.language_model, "latency of OlmoeModel cannot be measured: it has no head"),
    ],
    ids=["no model of text", "vision alone", "no head"],
)
def test_a_model_without_the_parts_is_refused_by_name(model, says):
    with pytest.raises(UserError, match=says):
        find_model_parts(model)
