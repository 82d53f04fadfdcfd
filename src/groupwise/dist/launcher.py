"""What torchrun tells its ranks, and what becomes of them when it is gone. No torch, so that `--help` is fast."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from groupwise.core.io.process_end import end_process

LOOPBACK = "lo"
_POLL_S = 1.0
_GRACE_S = 60.0
"""Time to finish a step and write a checkpoint."""


def is_launched() -> bool:
    """Whether torchrun, or accelerate through it, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def was_restarted() -> bool:
    """Whether the launcher has started this rank again after a failure, as `torchrun --max-restarts` does."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def launcher_identity() -> str:
    """Host, process id and start time of the launcher: the same for all restarts of its ranks, and for no other job.

    Empty without a launcher.
    """
    if not is_launched():
        return ""
    launcher = psutil.Process(os.getppid())
    return f"{socket.gethostname()} {launcher.pid} {launcher.create_time()}"


def rendezvous_id() -> str:
    """What `torchrun --rdzv-id` names: the same on all hosts of a job, and perhaps in later jobs. Empty without one."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if name == "none" else name


def listen_on_loopback() -> None:
    """Let the ranks of one machine connect over loopback, unless GLOO_SOCKET_IFNAME names another interface."""
    on_one_machine = is_launched() and os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if on_one_machine and LOOPBACK in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


@contextmanager
def stop_with_launcher() -> Iterator[None]:
    """Within, a rank whose launcher has died (kill -9 reaches no other process) stops as if by SIGTERM.

    It finishes the step and writes a checkpoint; if it cannot, it is ended after a minute.
    """
    if not is_launched():
        yield
        return
    finished = threading.Event()
    threading.Thread(target=_watch, args=(os.getppid(), finished), name="launcher", daemon=True).start()
    try:
        yield
    finally:
        finished.set()


def _watch(launcher: int, finished: threading.Event) -> None:
    while os.getppid() == launcher:
        if finished.wait(_POLL_S):
            return
    rank = os.environ.get("RANK", "0")
    sys.stderr.write(f"groupwise (rank {rank}): the launcher, process {launcher}, is gone: stopping.\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGTERM)
    if not finished.wait(_GRACE_S):
        end_process(
            f"the launcher, process {launcher}, is gone, and this step was not finished within {_GRACE_S:g} s. --resume"
            " continues from the newest checkpoint.",
            code=1,
        )
