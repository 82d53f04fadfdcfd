"""Ranks under torchrun: a killed rank, a killed launcher, SIGTERM and Ctrl-C. Real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import ENVIRONMENT, free_port, groupwise, wait_for_steps

from groupwise.core.io.files import read_jsonl

CLOCK = ("rollout_s", "reward_s", "update_s", "memory_bytes", "idle_share")
CHECKPOINT = ("policy.safetensors", "optimizer.safetensors", "ema.safetensors")


def launch(run: Path, *options: str, **popen) -> subprocess.Popen[str]:
    launcher = f"torch.distributed.run --nproc-per-node 2 --master-addr 127.0.0.1 --master-port {free_port()}".split()
    program = ["-m", "groupwise", "train", "fakes:slow_recipe", "--run-dir", str(run)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, *options, *program], env=ENVIRONMENT, text=True, **pipes, **popen
    )


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(launcher.pid).children()
    return sorted(children, key=lambda process: int(process.environ()["RANK"]))


def result_of(run: Path):
    steps = [
        {name: value for name, value in entry.items() if name not in CLOCK}
        for entry in read_jsonl(run / "metrics.jsonl")
    ]
    return steps, [(run / "checkpoints" / "step-000014" / name).read_bytes() for name in CHECKPOINT]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    run = tmp_path_factory.mktemp("ranks") / "unbroken"
    launcher = launch(run)
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, output
    return result_of(run)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 1])
def test_restarted_ranks_continue_by_themselves_and_end_byte_identical(tmp_path, unbroken, rank):
    launcher = launch(tmp_path / "run", "--max-restarts", "2")
    wait_for_steps(tmp_path / "run", 4, launcher, seconds=200)
    ranks_of(launcher)[rank].kill()
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, output
    assert "Resuming" in output
    assert result_of(tmp_path / "run") == unbroken


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_restart_never_takes_over_the_run_of_another_job(tmp_path):
    launcher = launch(tmp_path / "run")
    wait_for_steps(tmp_path / "run", 2, launcher, seconds=200)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=120)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    other = launch(tmp_path / "run", "--max-restarts", "1")
    output, _ = other.communicate(timeout=300)
    assert other.returncode == 1
    assert output.count("already holds a run") >= 2
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_of_a_killed_launcher_save_and_end(tmp_path):
    launcher = launch(tmp_path / "run")
    wait_for_steps(tmp_path / "run", 3, launcher, seconds=200)
    ranks = ranks_of(launcher)
    launcher.kill()
    refused = groupwise("train", "fakes:slow_recipe", "--run-dir", tmp_path / "run", "--resume")
    _gone, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    output, _ = launcher.communicate(timeout=30)
    assert "is gone: stopping" in output
    assert "Traceback" not in output
    assert refused.returncode == 0 or f"(process {ranks[0].pid} on " in refused.stderr
    steps = len(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps:06d}").is_dir()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C"])
def test_stopping_the_launcher_saves_and_leaves_without_a_traceback_of_ours(tmp_path, how):
    launcher = launch(tmp_path / "run", start_new_session=True)
    wait_for_steps(tmp_path / "run", 3, launcher, seconds=200)
    if how == "SIGTERM":
        launcher.send_signal(signal.SIGTERM)
    else:
        os.killpg(launcher.pid, signal.SIGINT)  # a terminal sends it to all processes, and torchrun sends it on
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode != 0
    assert "checkpoint written" in output
    assert "groupwise/training" not in output  # no frame of ours in any traceback
    steps = len(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps:06d}").is_dir()


CHILD = """
import time
from groupwise.dist.launcher import stop_with_launcher
with stop_with_launcher():
    print("ready", flush=True)
    time.sleep(60)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize("launched", [True, False])
def test_only_a_launched_process_ends_with_its_parent(launched):
    environment = {**ENVIRONMENT, **({"TORCHELASTIC_RUN_ID": "none"} if launched else {})}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], env=environment, text=True, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    (child,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait(timeout=10)
    time.sleep(0 if launched else 3)
    gone, alive = psutil.wait_procs([child], timeout=15 if launched else 0.1)
    assert bool(gone) == launched
    for process in alive:
        process.kill()


def test_the_slurm_script_starts_one_launcher_per_node_at_the_address_of_the_first(tmp_path):
    """Programs of SLURM that list more nodes than a pipe holds, and print what they would start."""
    for name, line in (("scontrol", "seq --format=node%.0f 20000"), ("srun", "echo $@")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-20000]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "32"}
    environment = ENVIRONMENT | job | {"SLURM_SUBMIT_DIR": "/job", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = Path(__file__).parents[2] / "examples" / "sharded.slurm"
    ended = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    words = ended.stdout.split()
    assert words[:3] == ["--cpus-per-task", "32", "torchrun"]
    assert words[words.index("--rdzv-endpoint") + 1] == "node1:29500"
    assert words[words.index("--nnodes") + 1] == "2"
    assert words[words.index("--run-dir") + 1] == "/job/runs/chat-gsm8k"
