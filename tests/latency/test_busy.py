"""The share of CPU time by hand, and of a process that other ones disturb."""

import time

import pytest
from tiny.busy import busy_machine
from tiny.llava import OPTIONS, llava_olmoe, sample

from groupwise.latency.busy import cpu_share, is_busy, undisturbed_ms
from groupwise.latency.meter import LatencyMeter, find_model_parts
from groupwise.latency.records import MeasuredLatency, Timing, summarize
from groupwise.workloads.controller.model.adapters import adapter_for
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor


def answer(total_ms, cpu_ms=None):
    return MeasuredLatency({}, total_ms, cpu_ms=cpu_ms)


def test_the_share_by_hand():
    # 8 + 10 of 10 + 20 ms.
    assert cpu_share([answer(10, 8), answer(20, 10)]) == pytest.approx(0.6)
    assert [is_busy(share) for share in (None, 0.6, 0.89, 0.91)] == [False, True, True, False]
    assert cpu_share([answer(10, 8), answer(20)]) is None, "of an accelerator the CPU time says nothing"
    assert cpu_share([]) is None
    assert [undisturbed_ms(each) for each in (answer(10, 8), answer(20))] == [8, 20]
    stages = dict.fromkeys(("vision", "prefill", "decode"), 1.0)
    assert summarize([Timing(stages, 10, cpu_ms=8.0), Timing(stages, 20, cpu_ms=10.0)]).cpu_share == pytest.approx(0.6)


def test_waiting_is_no_cpu_time_and_computing_is():
    model = llava_olmoe()
    meter = LatencyMeter(find_model_parts(model))
    waited = meter.time(lambda: time.sleep(0.1))
    assert waited.total_ms >= 100
    assert waited.cpu_ms < 30
    executor = Executor(adapter_for(model), OPTIONS)
    computed = [meter.time(lambda: executor.answer([AnswerRequest(sample(0), OPTIONS.full)])) for _ in range(5)]
    assert all(0 < each.cpu_ms <= 1.05 * each.total_ms for each in computed)


def test_a_busy_machine_is_noticed():
    model = llava_olmoe()
    meter, executor = LatencyMeter(find_model_parts(model)), Executor(adapter_for(model), OPTIONS)
    with busy_machine():
        seen, end = [], time.perf_counter() + 2
        while time.perf_counter() < end:
            seen.append(meter.time(lambda: executor.answer([AnswerRequest(sample(0), OPTIONS.full)])))
    assert is_busy(cpu_share(seen)), cpu_share(seen)
