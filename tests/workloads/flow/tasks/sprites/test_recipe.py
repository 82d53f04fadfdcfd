"""What the recipe `flow` promises, by a run of it: about five minutes on one core."""

from dataclasses import replace

import pytest

import groupwise as gw
from groupwise.recipes import load_recipe
from groupwise.training.evaluate import evaluate
from groupwise.training.run_folder.folder import RunFolder


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_training_goes_half_of_the_way_to_exact_labels(tmp_path):
    config = load_recipe("flow")
    config = replace(config, run=replace(config.run, run_dir=tmp_path))
    gw.train(config)
    evaluation = evaluate(config, RunFolder(tmp_path), pytest.fail)
    comparison = evaluation.report.metrics["comparison"]
    assert comparison["conditions"] == 480
    shares, quality = comparison["share_of_the_way"], comparison["metrics"]["quality"]
    assert shares["rewarded"] > 0.49  # 0.51 for three seeds, which differ by 0.008
    assert shares["not rewarded"] > 0.5
    assert quality["trained"] > quality["base"] - 0.01
