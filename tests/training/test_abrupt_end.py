"""What the next run says about one that was killed; the kernel's own killer is real, in a memory cgroup."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from processes import ENVIRONMENT, command, groupwise

from groupwise.training.run_folder.abrupt_end import explain_abrupt_end, oom_kills

HERE = {"process": 7, "host": socket.gethostname(), "oom_kills": 0, "ended": False}
GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup/memory/groupwise-test")


@pytest.mark.parametrize("owner", [{}, {**HERE, "ended": True}, {**HERE, "process": "7"}, {**HERE, "ended": None}])
def test_nothing_is_said_about_who_ended_in_order_or_is_unknown(owner):
    assert explain_abrupt_end(owner, {"step": 3}) is None


def test_memory_is_named_when_it_was_nearly_full_or_the_kernel_counted_a_kill():
    nearly_full = {"step": 3, "memory_bytes": {"host": 9 * GIB, "device": 10 * GIB}}
    half_full = {"step": 3, "memory_bytes": {"host": 5 * GIB, "device": 10 * GIB}}
    elsewhere = {**HERE, "host": "another", "oom_kills": 0}
    assert "took 9.0 GiB of 10.0 GiB (measured), so the system's out-of-memory" in explain_abrupt_end(
        elsewhere, nearly_full
    )
    assert "out-of-memory" not in explain_abrupt_end(elsewhere, half_full)
    since = {**HERE, "oom_kills": oom_kills() - 2}
    assert "The kernel has ended 2 processes on this machine since then" in explain_abrupt_end(since, half_full)
    assert "in its first step" in explain_abrupt_end(elsewhere, {})


@pytest.mark.parametrize("memory", [None, [], {"host": "x"}, {"host": 1, "device": 0}, {"host": 10**30, "device": 1}])
def test_a_strangers_numbers_are_not_believed(memory):
    assert "out-of-memory" not in explain_abrupt_end({**HERE, "host": "another"}, {"step": 3, "memory_bytes": memory})


EATS = """
import os, sys, fakes
from dataclasses import dataclass, replace

class Eats(fakes.TinyWorkload):
    calls = 0
    def rewards(self, rollouts):
        self.calls += 1
        if self.calls == 4 and os.environ.get("EAT"):
            self.eaten = [bytearray(os.urandom(1 << 20)) for _ in range(4000)]
        return super().rewards(rollouts)

@dataclass(frozen=True)
class EatsConfig(fakes.TinyConfig):
    def build(self, device):
        return Eats(self, device)

def recipe():
    config = fakes.recipe()
    return replace(config, workload=EatsConfig(), run=replace(config.run, preflight=False))
"""


@pytest.fixture
def small_memory():
    try:
        CGROUP.mkdir()
        (CGROUP / "memory.limit_in_bytes").write_text(str(900 << 20))
    except OSError:
        pytest.skip("a memory cgroup needs root")
    yield
    CGROUP.rmdir()


@pytest.mark.slow
def test_the_kernels_out_of_memory_killer_is_explained_by_the_next_run(tmp_path, small_memory):
    (tmp_path / "eats.py").write_text(EATS)
    arguments = ("train", tmp_path / "eats.py", "--run-dir", tmp_path / "run", "--resume")
    ended = subprocess.run(
        command(*arguments),
        env={**ENVIRONMENT, "EAT": "1"},
        preexec_fn=lambda: (CGROUP / "cgroup.procs").write_text(str(os.getpid())),
        capture_output=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    again = groupwise(*arguments)
    assert again.returncode == 0
    assert "The kernel has ended a process on this machine since then because memory ran out" in again.stderr
