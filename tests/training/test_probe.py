"""A trial step: rows_per_pass auto, and the measured peaks."""

from dataclasses import replace

import pytest
from fakes import TinyConfig, recipe

import groupwise as gw
from groupwise.core.io.files import read_jsonl
from groupwise.memory.stages import StageBytes
from groupwise.training.probe import probe
from groupwise.training.setup import set_up


def test_auto_takes_the_most_rows_that_fit():
    setup = set_up(replace(recipe(), rows_per_pass="auto"))
    assert setup.config.rows_per_pass == setup.shape.rows_per_pass == setup.state.row_limits["rows_per_pass"] == 32


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


def test_auto_follows_the_plan():
    class Hungry:
        def predict(self, spec):
            return StageBytes({"weights": 1}, {"activations": (1 << 50) if spec.shape.rows_per_pass > 8 else 1})

        def reductions(self):
            return []

    class Planned(TinyConfig):
        def memory_model(self):
            return Hungry()

    assert set_up(replace(recipe(), workload=Planned(), rows_per_pass="auto")).config.rows_per_pass == 8


def test_a_probe_counts_a_real_step_and_leaves_nothing_behind():
    peaks = probe(recipe())
    weights = sum(weight.nbytes for weight in set_up(recipe()).workload.policy.parameters())
    # the rollout holds the optimizer's two moments besides the weights, the update gradients too
    assert peaks["rollout"] > 3 * weights
    assert peaks["update"] > 4 * weights


def test_rows_that_are_no_number_are_refused():
    with pytest.raises(gw.UserError, match="rows_per_pass is many: it must be a whole number, or auto"):
        replace(recipe(), rows_per_pass="many")
