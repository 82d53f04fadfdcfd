"""Kill -9 at any moment, resume, and the run is bit-identical to the one that was not killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import ENVIRONMENT, TESTS, groupwise, kill, start, wait_for_steps

from groupwise.core.io.files import read_jsonl

FILES = ("policy.safetensors", "optimizer.safetensors", "ema.safetensors")
CLOCK = ("rollout_s", "reward_s", "update_s", "memory_bytes")


def result_of(folder):
    steps = [
        {name: value for name, value in entry.items() if name not in CLOCK}
        for entry in read_jsonl(folder / "metrics.jsonl")
    ]
    newest = folder / "checkpoints" / "step-000014"
    return steps, [(newest / name).read_bytes() for name in FILES]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill") / "unbroken"
    ended = groupwise("train", "fakes:slow_recipe", "--run-dir", folder)
    assert ended.returncode == 0, ended.stderr
    return result_of(folder)


def test_killed_in_mid_step_and_while_writing_then_resumed(tmp_path, unbroken):
    arguments = ("train", "fakes:slow_recipe", "--run-dir", tmp_path, "--resume")
    # seconds after a step was logged: at once (the checkpoint is being written), in the reward, near the update
    for steps, delay in ((2, 0.0), (5, 0.05), (8, 0.002), (11, 0.1)):
        process = start(*arguments)
        wait_for_steps(tmp_path, steps, process)
        time.sleep(delay)
        kill(process)
    ended = groupwise(*arguments)
    assert ended.returncode == 0, ended.stderr
    assert f"The last run here (process {process.pid} on" in ended.stderr
    assert "ended without a word after step" in ended.stderr
    assert result_of(tmp_path) == unbroken


def test_ctrl_c_writes_a_checkpoint_and_leaves_cleanly(tmp_path, unbroken):
    arguments = ("train", "fakes:slow_recipe", "--run-dir", tmp_path, "--checkpoint-every", "100")
    process = start(*arguments)
    wait_for_steps(tmp_path, 3, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert "checkpoint written" in stderr
    assert "Traceback" not in stderr
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{len(read_jsonl(tmp_path / 'metrics.jsonl')):06d}"
    ended = groupwise(*arguments, "--resume")
    assert ended.returncode == 0, ended.stderr
    assert result_of(tmp_path) == unbroken


def test_two_runs_never_share_a_folder_and_a_killed_one_leaves_it_free(tmp_path):
    arguments = ("train", "fakes:slow_recipe", "--run-dir", tmp_path, "--resume")
    process = start(*arguments, "--steps", "2000")  # minutes
    wait_for_steps(tmp_path, 1, process)
    refused = groupwise(*arguments)
    assert refused.returncode == 2
    assert "Another process is training in" in refused.stderr
    kill(process)
    ended = groupwise(*arguments)
    assert ended.returncode == 0, ended.stderr


def killed(recipe: str, folder: Path, kills: int, *, seconds: float) -> dict:
    ended = subprocess.run(
        [sys.executable, TESTS / "kills.py", recipe, folder, str(kills)],
        env={**ENVIRONMENT, "PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}{os.pathsep}{TESTS.parent}"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


@pytest.mark.slow
def test_an_embedded_recipe_survives_five_kills(tmp_path):
    assert killed("controller", tmp_path, 5, seconds=170)["same"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", ["chat", "controller", "flow"])
def test_embedded_recipes_survive_25_kills(tmp_path, recipe):
    assert killed(recipe, tmp_path, 25, seconds=1700)["same"]
