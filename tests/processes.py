"""Real processes for tests: started here, bounded in time, and ended by nobody else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from groupwise.core.io.files import read_jsonl

TESTS = Path(__file__).parent
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")]),
    "COLUMNS": "120",
}


def groupwise(*arguments: object, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        command(*arguments), env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds, check=False
    )


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start the command line and leave it running."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command(*arguments), env=ENVIRONMENT, text=True, **pipes)


def wait_for_steps(folder: Path, steps: int, process: subprocess.Popen[str], *, seconds: float = 60) -> None:
    """Until the run has logged so many steps."""
    deadline = time.monotonic() + seconds
    while len(read_jsonl(folder / "metrics.jsonl")) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.005)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill -9: it has no time to put anything right."""
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "groupwise", *map(str, arguments)]


def on_ranks(
    ranks: int, program: Sequence[object], *, seconds: float = 150, launcher: str = "torchrun"
) -> subprocess.CompletedProcess[str]:
    """Run a program (a file, or -m and a module, with its words) on several ranks, with gloo on loopback."""
    port = str(free_port())
    launchers = {
        "torchrun": f"torch.distributed.run --nproc-per-node {ranks} --nnodes 1 --master-addr 127.0.0.1 --master-port",
        "accelerate": f"accelerate.commands.launch --multi-gpu --num-processes {ranks} --num-machines 1"
        " --mixed-precision no --dynamo-backend no --main-process-port",
    }
    start_with = [sys.executable, "-m", *launchers[launcher].split(), port]
    return subprocess.run(
        [*start_with, *map(str, program)], env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds, check=False
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
