"""A workload's own metrics: means over the rows of all ranks that have the number; warnings are shown once."""

from dataclasses import replace

import pytest
import torch
from fakes import TinyConfig, TinyWorkload, recipe

import groupwise as gw
from groupwise.core.errors import UserError
from groupwise.core.io.files import read_jsonl


class MeasuredReporter(gw.Reporter):
    wrong = False

    def step_metrics(self, rollouts, advantages):
        if self.wrong:
            return {"odd": torch.zeros(3)}
        number = torch.arange(len(rollouts), dtype=torch.float32)
        return {
            "number": number,
            "even_number": number.masked_fill(number % 2 == 1, torch.nan),
            "none": torch.full_like(number, torch.nan),
            "pushed_up": (advantages > 0).double(),
        }

    def step_warning(self, metrics):
        return f"number is {metrics['number']:g}" if 1 <= self.count_calls() <= 3 else None

    calls = 0

    def count_calls(self):
        type(self).calls += 1
        return type(self).calls - 1


class Measured(TinyWorkload):
    reporter = MeasuredReporter()


class Wrong(TinyWorkload):
    reporter = type("WrongReporter", (MeasuredReporter,), {"wrong": True})()


def config_of(folder, kind):
    class Chosen(TinyConfig):
        def build(self, device):
            return kind(self, device)

    return replace(recipe(), workload=Chosen(), run=replace(recipe().run, run_dir=folder, preflight=False))


def test_metrics_are_averaged_over_the_rows_that_have_them_and_warnings_are_shown_when_they_begin(tmp_path, capsys):
    gw.train(config_of(tmp_path, Measured))
    metrics = read_jsonl(tmp_path / "metrics.jsonl")
    # 32 rows: 0 to 31, and 0, 2, ... 30
    assert metrics[0]["number"] == 15.5
    assert metrics[0]["even_number"] == 15
    assert metrics[0]["none"] is None
    assert 0 < metrics[0]["pushed_up"] < 1
    stderr = capsys.readouterr().err
    assert stderr.count("Warning: Step 2: number is 15.5") == 1
    assert stderr.count("number is 15.5") == 1


def test_a_metric_of_another_shape_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"step_metrics\(\) returned 'odd' of shape \(3,\) for 32 rows"):
        gw.train(config_of(tmp_path, Wrong))


def test_samples_are_shown_as_a_table_every_few_steps(tmp_path, capsys):
    config = config_of(tmp_path, TinyWorkload)
    gw.train(replace(config, run=replace(config.run, show_samples_every=4)))
    stderr = capsys.readouterr().err
    assert "Samples of step 0" in stderr
    assert "Samples of step 4" in stderr
    assert "Samples of step 1" not in stderr
    assert "advantage" in stderr
