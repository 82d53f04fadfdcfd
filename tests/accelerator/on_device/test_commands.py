"""Commands on the device: train, kill -9, resume, eval, export of all embedded recipes; measure, profile, serving."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from processes import ENVIRONMENT
from safetensors.torch import load_file

import groupwise as gw
from accelerator.command import RECIPE
from accelerator.steps import RECIPES
from groupwise.cli.main import main
from groupwise.workloads.controller.model.load import load_model
from groupwise.workloads.controller.tasks.mosaic.questions import make_question_set
from groupwise.workloads.controller.tasks.mosaic.scene import HandwritingSplit

pytestmark = pytest.mark.timeout(600)
EXPORTED = {"chat": 0, "controller": 0}
"""Exit code of `export` by recipe; 2 for the embedded flow models and doors, which no library loads."""


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def weights(folder):
    return load_file(folder / "checkpoints" / "step-000002" / "policy.safetensors")


@pytest.fixture
def of_recipe(monkeypatch):
    return lambda name: monkeypatch.setenv("GROUPWISE_TEST_RECIPE", name)


@pytest.mark.device
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_that_was_killed_is_resumed_bit_identically_evaluated_and_exported(device, name, tmp_path, of_recipe):
    of_recipe(name)
    command = [sys.executable, "-m", "accelerator.command", "--kill", "update:1:0", "train", RECIPE, "--run-dir"]
    environment = {**ENVIRONMENT, "GROUPWISE_TEST_RECIPE": name, "GROUPWISE_TEST_DEVICE": device.type}
    killed = subprocess.run(
        [*command, str(tmp_path / "killed")], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert run("train", RECIPE, "--run-dir", tmp_path / "killed", "--resume") == 0
    assert run("train", RECIPE, "--run-dir", tmp_path / "unbroken") == 0
    resumed, unbroken = weights(tmp_path / "killed"), weights(tmp_path / "unbroken")
    assert all(torch.equal(resumed[key], unbroken[key]) for key in unbroken)
    if name != "controller":  # whose report times hundreds of answers
        assert run("eval", tmp_path / "killed", "--recipe", RECIPE) == 0
    assert run("export", tmp_path / "killed", tmp_path / "exported") == EXPORTED.get(name, 2)
    if name == "chat":
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        trained = next(value for key, value in resumed.items() if key.endswith("embed_tokens.weight"))
        assert torch.equal(model.get_input_embeddings().weight, trained)
    if name == "controller":
        check_serving(tmp_path / "exported", device)


def check_serving(folder, device: torch.device) -> None:
    """The loaded controller chooses and answers on the device as it does on the CPU."""
    model = gw.AdaptiveModel.from_pretrained(folder)
    assert model.loaded.model.device.type == next(model.policy.parameters()).device.type == device.type
    on_cpu = gw.AdaptiveModel.from_pretrained(folder, model=load_model("mosaic", device="cpu"))
    pixels = make_question_set(HandwritingSplit.VALIDATION, 1).mosaics.pixels[0]
    mosaic = Image.fromarray((255 * np.asarray(pixels)).astype(np.uint8))
    assert model.estimate(mosaic, "digit b3").total_ms > 0
    for budget_ms in (1.0, 1e6):
        reply, expected = (each.generate(mosaic, "digit b3", budget_ms, best_effort=True) for each in (model, on_cpu))
        assert (reply.answer, reply.knobs) == (expected.answer, expected.knobs)
        assert reply.measured.total_ms > 0


@pytest.mark.device
def test_measure_and_profile_time_the_embedded_model_on_the_device(device, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("measure", "mosaic", "--runs", 1, "--warm-up", 0, "--new-tokens", 2, "--json") == 0
    measured = json.loads(capsys.readouterr().out)
    assert device.type in measured["machine"]
    assert all(row["vision"]["p50_ms"] > 0 and row["decode"]["p50_ms"] > 0 for row in measured["measured"])
    assert run("profile", "mosaic", "--seconds", 8, "--quantile", 0.8, "--output", "estimator.json", "--json") == 0
    assert device.type in json.dumps(json.loads((tmp_path / "estimator.json").read_text()))
