"""Kill -9 of a flow run, in a reward and while a checkpoint is written: resumed, it is the run that was not killed."""

import time
from dataclasses import replace

import pytest
from processes import groupwise, kill, start, wait_for_steps

import groupwise as gw
from groupwise.core.io.files import read_jsonl
from workloads.flow.small import slow_recipe

CLOCK = ("rollout_s", "reward_s", "update_s", "memory_bytes")


def result_of(folder):
    steps = [
        {name: value for name, value in entry.items() if name not in CLOCK}
        for entry in read_jsonl(folder / "metrics.jsonl")
    ]
    newest = folder / "checkpoints" / "step-000010"
    files = ("policy.safetensors", "ema.safetensors", "optimizer.safetensors")
    return steps, read_jsonl(folder / "samples.jsonl"), [(newest / name).read_bytes() for name in files]


@pytest.mark.timeout(450)
def test_killed_twice_and_resumed_it_is_the_run_that_was_not(tmp_path):
    config = slow_recipe()
    gw.train(replace(config, run=replace(config.run, run_dir=tmp_path / "unbroken")))
    words = ("train", "workloads.flow.small:slow_recipe", "--run-dir", tmp_path / "killed", "--resume")
    for steps, delay in ((3, 0.05), (6, 0.0)):  # in the reward; while the sixth step's checkpoint is written
        process = start(*words)
        wait_for_steps(tmp_path / "killed", steps, process, seconds=120)
        time.sleep(delay)
        kill(process)
        assert len(read_jsonl(tmp_path / "killed" / "metrics.jsonl")) < config.steps
    ended = groupwise(*words)
    assert ended.returncode == 0, ended.stderr
    assert "Resuming" in ended.stderr
    assert result_of(tmp_path / "killed") == result_of(tmp_path / "unbroken")
