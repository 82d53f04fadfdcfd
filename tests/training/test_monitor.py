"""The plan beside what was measured, and a word when the device is too full or mostly empty."""

from dataclasses import replace

import pytest
from fakes import TinyConfig, recipe

import groupwise as gw
from groupwise.core.shape import StepShape
from groupwise.memory.measure import MemoryUsage
from groupwise.memory.monitor import Monitor
from groupwise.memory.stages import StageBytes, StepSpec
from groupwise.training.probe import probe
from groupwise.training.run_folder import read_jsonl
from groupwise.training.setup import set_up

GIB = 1 << 30


class TenMebibytesARow:
    def predict(self, spec):
        rows = spec.shape.rows_per_pass
        return StageBytes({"weights": 100}, {"weights": 100, "activations": rows * 10 << 20})

    def reductions(self):
        return []


def monitor(said, *, accelerator=True, rows=8):
    job = StepSpec(StepShape(10**6, 64, 8, 1, rows, "whole"))
    return Monitor(TenMebibytesARow(), job, device=4 * GIB, base=1000, accelerator=accelerator, warn=said.append)


def memory(peak):
    return MemoryUsage(peak=peak, current=peak, device=4 * GIB, host=peak)


def test_prediction_and_error_stand_beside_the_peak():
    seen = monitor([]).see(memory(100 << 20), rows_per_pass=4)
    assert seen.predicted == 1000 + 100 + (40 << 20)
    assert seen.error == pytest.approx(0.4 - 1, abs=1e-4)
    assert seen.utilization == pytest.approx(100 / 4096)
    assert {"peak", "current", "device", "host", "predicted", "utilization", "prediction_error"} == set(seen.to_dict())


def test_a_full_device_is_told_once_with_the_remedy():
    said = []
    watch = monitor(said)
    for _ in range(5):
        watch.see(memory(int(3.9 * GIB)), rows_per_pass=8)
    (text,) = said
    assert "Memory peaks at 3.9 GiB, 97% of the device" in text
    assert "rows_per_pass 8 -> 4" in text


def test_a_device_that_stays_empty_is_told_with_the_setting_that_would_use_it():
    said = []
    watch = monitor(said)
    for _ in range(5):
        watch.see(memory(GIB), rows_per_pass=8)
    (text,) = said
    rows = watch.plan.recommended.shape.rows_per_pass
    assert rows > 100
    assert f"rows_per_pass {rows} with conditions_per_step 64 would use" in text
    quiet = []
    for _ in range(5):
        monitor(quiet, accelerator=False).see(memory(GIB), rows_per_pass=8)
    assert not quiet, "RAM need not be filled"


def test_every_step_logs_its_memory(tmp_path):
    run = replace(recipe().run, run_dir=tmp_path / "run")
    gw.train(replace(recipe(), steps=2, run=run))
    for entry in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        found = entry["memory_bytes"]
        assert 0 < found["current"] <= found["peak"] <= found["device"]
        assert found["utilization"] == pytest.approx(found["peak"] / found["device"])


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


def test_auto_takes_the_most_rows_that_fit():
    setup = set_up(replace(recipe(), rows_per_pass="auto"))
    assert setup.config.rows_per_pass == setup.shape.rows_per_pass == setup.state.cut.rows_per_pass == 32


def test_auto_on_resume_takes_what_the_run_used(tmp_path, monkeypatch):
    config = replace(recipe(), rows_per_pass="auto", steps=2)
    config = replace(config, run=replace(config.run, run_dir=tmp_path / "run"))
    monkeypatch.setattr("groupwise.training.probe.choose_rows", lambda setup: 4)  # as on a fuller device
    gw.train(config)
    monkeypatch.undo()
    assert set_up(config).config.rows_per_pass == 32, "what a new run would take now"
    gw.train(replace(config, steps=3, run=replace(config.run, resume=True)))
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [entry["rows_per_pass"] for entry in metrics] == [4, 4, 4]


def test_auto_listens_to_the_plan():
    class Hungry(TenMebibytesARow):
        def predict(self, spec):
            return StageBytes({"weights": 1}, {"activations": (1 << 50) if spec.shape.rows_per_pass > 8 else 1})

    class Planned(TinyConfig):
        def memory_model(self):
            return Hungry()

    assert set_up(replace(recipe(), workload=Planned(), rows_per_pass="auto")).config.rows_per_pass == 8


def test_a_probe_counts_a_real_step_and_leaves_nothing_behind():
    found = probe(recipe())
    weights = sum(weight.nbytes for weight in set_up(recipe()).workload.policy.parameters())
    # the rollout holds the optimizer's two moments besides the weights, the update gradients too
    assert found["rollout"] > 3 * weights
    assert found["update"] > 4 * weights


def test_rows_that_are_no_number_are_refused():
    with pytest.raises(gw.UserError, match="rows_per_pass is many: it must be a whole number, or auto"):
        replace(recipe(), rows_per_pass="many")
