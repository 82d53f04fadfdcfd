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
from torch.testing import assert_close

from groupwise.core.io.files import read_jsonl
from groupwise.dist.heartbeat import is_lost_rank
from groupwise.workloads.checkpoint_files import newest_valid_checkpoint, read_weights

CLOCK = ("rollout_s", "reward_s", "update_s", "memory_bytes", "idle_share")


def launch(run: Path, launcher: str, *options: object, recipe: str = "fakes:slow_recipe") -> subprocess.Popen[str]:
    program = ["-m", "groupwise", "train", recipe, "--run-dir", str(run), *map(str, options)]
    words = [sys.executable, "-m", "torch.distributed.run", *launcher.split(), *program]
    return subprocess.Popen(words, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def on_one_machine(ranks: int = 2) -> str:
    return f"--nproc-per-node {ranks} --master-addr 127.0.0.1 --master-port {free_port()}"


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(launcher.pid).children()
    return sorted(children, key=lambda process: int(process.environ()["RANK"]))


LOST = {
    "killed": (signal.SIGKILL, "is gone"),
    "stopped": (signal.SIGSTOP, "did not answer within 6 s (--rank-timeout-s)"),
}
SAVED = {0: "Rank 1 has saved step", 1: "Step "}


@pytest.mark.parametrize(
    ("rank", "fault"),
    [
        (0, "killed"),
        pytest.param(1, "killed", marks=pytest.mark.slow),
        pytest.param(1, "stopped", marks=pytest.mark.slow),
    ],
)
def test_the_other_rank_names_it_and_saves_the_complete_steps(tmp_path, rank, fault):
    number, reason = LOST[fault]
    options = ("--rank-timeout-s", 6, "--steps", 400, "--checkpoint-every", 100)
    launcher = launch(tmp_path, on_one_machine(), *options)
    wait_for_steps(tmp_path, 2, launcher, seconds=150)
    begun = time.monotonic()
    ranks_of(launcher)[rank].send_signal(number)
    output, _ = launcher.communicate(timeout=150)
    assert time.monotonic() - begun < 100  # torchrun gives a stopped process 30 s
    (line,) = [line for line in output.splitlines() if line.startswith(f"groupwise (rank {1 - rank})")]
    assert f"Rank {rank} (last seen at step" in line
    assert reason in line
    assert SAVED[rank] in line
    assert "groupwise/training" not in output  # no frame of ours
    assert "exitcode  : 3" in output
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{len(read_jsonl(tmp_path / 'metrics.jsonl')):06d}"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_another_rank_saved_for_rank_0_is_resumed_byte_identical(tmp_path):
    run = ("--checkpoint-every", 100)
    killed = launch(tmp_path / "killed", on_one_machine(), *run)
    wait_for_steps(tmp_path / "killed", 5, killed, seconds=150)
    ranks_of(killed)[0].kill()
    killed.communicate(timeout=150)
    _unbroken, resumed = (
        launch(tmp_path / name, on_one_machine(), *run, *flags).communicate(timeout=200)[0]
        for name, flags in (("unbroken", ()), ("killed", ("--resume",)))
    )
    after = next(line for line in resumed.splitlines() if "Resuming" in line)
    assert int(after.rstrip(".").split()[-1]) >= 5, after
    for file in ("policy", "optimizer", "ema"):
        path = Path("checkpoints") / "step-000014" / f"{file}.safetensors"
        assert (tmp_path / "killed" / path).read_bytes() == (tmp_path / "unbroken" / path).read_bytes()
    logs = [
        [
            {name: value for name, value in entry.items() if name not in CLOCK}
            for entry in read_jsonl(tmp_path / run / log)
        ]
        for run in ("killed", "unbroken")
        for log in ("metrics.jsonl", "samples.jsonl")
    ]
    assert logs[:2] == logs[2:]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_a_sharded_run_it_says_that_the_steps_are_lost(tmp_path):
    options = ("--steps", 400, "--checkpoint-every", 3, "--shard", "full")
    launcher = launch(tmp_path, on_one_machine(), *options, recipe="dist.shard_fakes:recipe")
    wait_for_steps(tmp_path, 5, launcher, seconds=150)
    ranks_of(launcher)[0].kill()
    output, _ = launcher.communicate(timeout=150)
    (line,) = [line for line in output.splitlines() if line.startswith("groupwise (rank 1)")]
    assert (
        "The run is sharded and no rank has the whole state, so the steps since the newest checkpoint are lost" in line
    )
    assert newest_valid_checkpoint(tmp_path / "checkpoints", lambda message: None) is not None


def test_errors_that_mean_a_lost_rank():
    assert is_lost_rank(RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"))
    assert is_lost_rank(RuntimeError("[../gloo/...] Timed out waiting 5000ms for recv operation to complete"))
    assert not is_lost_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost_rank(ValueError("gloo"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("recipe", "shard"),
    [("fakes:slow_recipe", ()), ("dist.shard_fakes:recipe", ("--shard", "full"))],
    ids=["whole", "sharded"],
)
def test_with_one_of_two_machines_lost_the_run_goes_on_with_the_other(tmp_path, recipe, shard):
    """Two launchers on loopback stand for two machines; one and its rank are killed, and nothing is done by hand."""
    endpoint = f"127.0.0.1:{free_port()}"
    elastic = f"--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint {endpoint}"
    elastic += " --rdzv-id test --rdzv-conf join_timeout=300,last_call_timeout=8 --local-addr 127.0.0.1"
    options = ("--rank-timeout-s", 30, "--workload.seconds-per-step", 0.4)
    first = launch(tmp_path / "elastic", elastic, *options, *shard, recipe=recipe)
    time.sleep(2)
    second = launch(tmp_path / "elastic", elastic, *options, *shard, recipe=recipe)
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
    assert ("the run goes on without --shard full" in output) == bool(shard)
    alone = launch(tmp_path / "alone", on_one_machine(1), "--workload.seconds-per-step", 0.0, recipe=recipe)
    assert alone.wait(timeout=200) == 0
    newest = [
        newest_valid_checkpoint(tmp_path / name / "checkpoints", lambda message: None) for name in ("elastic", "alone")
    ]
    assert newest[0].name == newest[1].name
    weights = [dict(read_weights(path, ema=False)) for path in newest]
    for name, weight in weights[1].items():
        assert_close(weights[0][name], weight, rtol=0, atol=1e-10)
