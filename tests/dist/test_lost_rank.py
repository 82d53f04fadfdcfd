"""A rank that is killed, stopped or lost with its machine: the others say which one, save, and end or go on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import ENVIRONMENT, free_port, wait_for_steps
from safetensors.torch import load_file
from torch.testing import assert_close

from groupwise.core.io.files import read_jsonl
from groupwise.dist.heartbeat import is_lost_rank


def launch(run: Path, launcher: str, *options: object) -> subprocess.Popen[str]:
    program = ["-m", "groupwise", "train", "fakes:slow_recipe", "--run-dir", str(run), *map(str, options)]
    words = [sys.executable, "-m", "torch.distributed.run", *launcher.split(), *program]
    return subprocess.Popen(words, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def on_one_machine(ranks: int = 2) -> str:
    return f"--nproc-per-node {ranks} --master-addr 127.0.0.1 --master-port {free_port()}"


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(launcher.pid).children()
    return sorted(children, key=lambda process: int(process.environ()["RANK"]))


LOST = {
    "killed": (signal.SIGKILL, "Rank 1 (last seen at step", "is gone"),
    "stopped": (signal.SIGSTOP, "Rank 1 (last seen at step", "did not answer within 6 s (--rank-timeout-s)"),
}


@pytest.mark.parametrize("fault", ["killed", pytest.param("stopped", marks=pytest.mark.slow)])
def test_the_other_rank_names_it_and_saves_the_complete_steps(tmp_path, fault):
    number, *parts = LOST[fault]
    options = ("--rank-timeout-s", 6, "--steps", 400, "--checkpoint-every", 100)
    launcher = launch(tmp_path, on_one_machine(), *options)
    wait_for_steps(tmp_path, 2, launcher, seconds=150)
    begun = time.monotonic()
    ranks_of(launcher)[1].send_signal(number)
    output, _ = launcher.communicate(timeout=150)
    assert time.monotonic() - begun < 100  # torchrun gives a stopped process 30 s
    (line,) = [line for line in output.splitlines() if line.startswith("groupwise (rank 0)")]
    assert all(part in line for part in parts)
    assert "groupwise/training" not in output  # no frame of ours
    assert "exitcode  : 3" in output
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{len(read_jsonl(tmp_path / 'metrics.jsonl')):06d}"


def test_errors_that_mean_a_lost_rank():
    assert is_lost_rank(RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"))
    assert is_lost_rank(RuntimeError("[../gloo/...] Timed out waiting 5000ms for recv operation to complete"))
    assert not is_lost_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost_rank(ValueError("gloo"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_one_of_two_machines_lost_the_run_goes_on_with_the_other(tmp_path):
    """Two launchers on loopback stand for two machines; one and its rank are killed, and nothing is done by hand."""
    endpoint = f"127.0.0.1:{free_port()}"
    elastic = f"--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint {endpoint}"
    elastic += " --rdzv-id test --rdzv-conf join_timeout=300,last_call_timeout=8 --local-addr 127.0.0.1"
    options = ("--rank-timeout-s", 30, "--workload.seconds-per-step", 0.4)
    first = launch(tmp_path / "elastic", elastic, *options)
    time.sleep(2)
    second = launch(tmp_path / "elastic", elastic, *options)
    try:
        wait_for_steps(tmp_path / "elastic", 3, first, seconds=200)
        for process in (second, *psutil.Process(second.pid).children()):
            os.kill(process.pid, signal.SIGKILL)
        output, _ = first.communicate(timeout=400)
    finally:
        second.kill()
        first.kill()
    assert first.returncode == 0, output[-4000:]
    assert "Resuming" in output
    alone = launch(tmp_path / "alone", on_one_machine(1), "--workload.seconds-per-step", 0.0)
    assert alone.wait(timeout=200) == 0
    weights = [load_file(tmp_path / name / "checkpoints/step-000014/policy.safetensors") for name in ("elastic", "alone")]
    for name, weight in weights[1].items():
        assert_close(weights[0][name], weight, rtol=0, atol=1e-10)
