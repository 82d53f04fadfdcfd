"""The final report: base, trained and upper model and the truth on the same fresh conditions."""

from dataclasses import replace

import pytest
import torch

from groupwise.recipes import load_recipe
from groupwise.workloads.flow.tasks.sprites.comparison import Mean, share_of_the_way


def test_shares_by_hand():
    base, upper = Mean(0.5, 0.01), Mean(0.8, 0.01)
    assert share_of_the_way(base, Mean(0.65, 0.01), upper) == pytest.approx(0.5)
    assert share_of_the_way(Mean(4, 0.1), Mean(1, 0.1), Mean(0, 0.1)) == pytest.approx(0.75)  # errors fall
    assert share_of_the_way(base, upper, Mean(0.515, 0.01)) is None  # no way that could be told from chance
    # 1, 2, 3: std 1
    assert Mean.of(torch.tensor([1.0, 2.0, 3.0])).half_width == pytest.approx(1.96 / 3**0.5)


def test_the_report_of_an_untrained_model_is_on_its_way_nowhere(tmp_path):
    config = load_recipe("flow")
    sizes = {"scenes": 8, "held_out_scenes": 1, "final_scenes": 12}
    workload = replace(config.workload, **sizes).build(torch.device("cpu"))
    report = workload.reporter.final_report()
    comparison = report.metrics["comparison"]
    for metric in comparison["metrics"].values():
        assert metric["base"] == metric["trained"]
    camera, quality = (comparison["metrics"][name] for name in ("camera", "quality"))
    assert camera["base"] + 0.2 < camera["upper"] < camera["truth"] == pytest.approx(1, abs=1e-5)
    assert quality["upper"] < quality["truth"]
    assert comparison["share_of_the_way"] == {"rewarded": 0, "not rewarded": 0}
    with torch.no_grad():
        for weight in workload.policy.parameters():
            if weight.requires_grad:
                weight.zero_()
    spoiled = workload.reporter.final_report().metrics["comparison"]["metrics"]["camera"]
    assert spoiled["base"] == camera["base"]
    assert spoiled["trained"] < camera["base"]
    for name, draw in report.images.items():
        draw(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000
