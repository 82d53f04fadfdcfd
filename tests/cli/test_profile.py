"""`groupwise profile` on a folder of a tiny model, and on the embedded one."""

import json

import pytest
from tiny.busy import busy_machine
from tiny.llava import llava_olmoe

from groupwise.cli.main import main
from groupwise.core.errors import UserError
from groupwise.latency.estimator import LatencyEstimator
from groupwise.workloads.controller.latency.estimates import KnobLatencyEstimator, architecture_fingerprint
from groupwise.workloads.controller.model.load import load_model


def test_an_estimator_is_fitted_saved_and_reported(capsys, tmp_path):
    llava_olmoe().save_pretrained(tmp_path / "tiny")
    file = tmp_path / "estimator.json"
    arguments = ["profile", str(tmp_path / "tiny"), "--seconds", "3", "--new-tokens", "2", "--output", str(file)]
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    loaded = load_model(tmp_path / "tiny")
    estimator = LatencyEstimator.load(file, model=architecture_fingerprint(loaded.model))
    assert printed["answers"] == len(estimator.ratios) >= 19
    assert printed["median_error"] >= 0
    rows = KnobLatencyEstimator(estimator, loaded.options, new_tokens=2).rows(
        dict.fromkeys(loaded.options.crops_by_tier, 40)
    )
    assert (rows.upper_ms > 0).all()
    with pytest.raises(UserError, match="was fitted for"):
        LatencyEstimator.load(file, model="another")


def test_a_profile_of_a_busy_machine_says_so(capsys, tmp_path):
    llava_olmoe().save_pretrained(tmp_path / "tiny")
    file = tmp_path / "estimator.json"
    with busy_machine():
        assert main(["profile", str(tmp_path / "tiny"), "--seconds", "4", "--output", str(file), "--json"]) == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert printed["was_busy"] is True
    assert printed["cpu_share"] == json.loads(file.read_text())["cpu_share"] < 0.7
    assert "Warning: the machine was busy with other programs: answers had the CPU for" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["mosaic", "--seconds", "0"], "seconds is 0"),
        (["mosaic", "--new-tokens", "0"], "new_tokens is 0"),
        (["mosaic", "--seconds", "0.2", "--quantile", "0.999"], "too few for a quantile of 0.999"),
        (["./nowhere"], "There is no folder ./nowhere"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments, "--json"]) == 2
    assert says in json.loads(capsys.readouterr().out)["error"]
    assert not list(tmp_path.iterdir())
