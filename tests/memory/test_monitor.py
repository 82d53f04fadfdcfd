"""Measured memory beside the plan, and one warning when utilization is too high or too low."""

from dataclasses import replace

import pytest
from fakes import TinyConfig, recipe

import groupwise as gw
from groupwise.core.io.files import read_jsonl
from groupwise.core.shape import StepShape
from groupwise.memory.measure import MemoryUsage
from groupwise.memory.monitor import Monitor
from groupwise.memory.stages import StageBytes, StepSpec

GIB = 1 << 30


class TenMebibytesARow:
    def predict(self, spec):
        rows = spec.shape.rows_per_pass
        return StageBytes({"weights": 100}, {"weights": 100, "activations": rows * 10 << 20})

    def reductions(self):
        return []


def monitor(warnings, *, on_accelerator=True, rows=8):
    spec = StepSpec(StepShape(10**6, 64, 8, 1, rows, "whole"))
    settings = {"device_bytes": 4 * GIB, "base_bytes": 1000, "on_accelerator": on_accelerator}
    return Monitor(TenMebibytesARow(), spec, **settings, warn=warnings.append)


def memory(peak):
    return MemoryUsage(peak=peak, current=peak, device=4 * GIB, host=peak)


def test_prediction_and_error_stand_beside_the_peak():
    usage = monitor([]).record(memory(100 << 20), rows_per_pass=4)
    assert usage.predicted == 1000 + 100 + (40 << 20)
    assert usage.error == pytest.approx(0.4 - 1, abs=1e-4)
    assert usage.utilization == pytest.approx(100 / 4096)
    assert {"peak", "current", "device", "host", "predicted", "utilization", "prediction_error"} == set(usage.to_dict())


def test_on_the_cpu_libraries_that_the_first_step_loaded_are_no_error_of_the_plan():
    """100 MiB are left after the first step, of which 100 bytes are planned weights."""
    recorded = monitor([], on_accelerator=False)
    for peak in (100 << 20, 120 << 20):
        usage = recorded.record(memory(peak), rows_per_pass=4)
        assert usage.predicted == (100 << 20) + (40 << 20)


def test_high_utilization_is_warned_of_once_with_the_remedy():
    warnings = []
    recorded = monitor(warnings)
    for _ in range(5):
        recorded.record(memory(int(3.9 * GIB)), rows_per_pass=8)
    (text,) = warnings
    assert "Memory peaks at 3.9 GiB, 97% of the device" in text
    assert "rows_per_pass 8 -> 4" in text


def test_low_utilization_is_warned_of_with_the_setting_that_would_use_it():
    warnings = []
    recorded = monitor(warnings)
    for _ in range(5):
        recorded.record(memory(GIB), rows_per_pass=8)
    (text,) = warnings
    rows = recorded.plan.recommended.shape.rows_per_pass
    assert rows > 100
    assert f"rows_per_pass {rows} with conditions_per_step 64 would use" in text
    no_warnings = []
    for _ in range(5):
        monitor(no_warnings, on_accelerator=False).record(memory(GIB), rows_per_pass=8)
    assert not no_warnings, "RAM need not be filled"


def test_every_step_logs_its_memory(tmp_path):
    run = replace(recipe().run, run_dir=tmp_path / "run")
    gw.train(replace(recipe(), steps=2, run=run))
    for entry in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        memory_bytes = entry["memory_bytes"]
        assert 0 < memory_bytes["current"] <= memory_bytes["peak"] <= memory_bytes["device"]
        assert memory_bytes["utilization"] == pytest.approx(memory_bytes["peak"] / memory_bytes["device"])


class PlannedTiny(TinyConfig):
    def memory_model(self):
        return TenMebibytesARow()


def test_a_run_with_a_plan_keeps_it_in_its_folder(tmp_path, capsys):
    run = replace(recipe().run, run_dir=tmp_path / "run")
    gw.train(replace(recipe(), workload=PlannedTiny(), steps=1, run=run))
    (entry,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert entry["memory_bytes"]["predicted"] > 40 << 20
    assert "planned" in capsys.readouterr().err
    assert '"recommended"' in (tmp_path / "run" / "plan.json").read_text()
