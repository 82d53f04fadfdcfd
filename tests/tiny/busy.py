"""A machine that is really busy: this process on one core, beside others that spin."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

HAS_AFFINITY = hasattr(os, "sched_setaffinity")
_SPIN = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


@contextmanager
def on_one_core() -> Iterator[None]:
    """What runs beside it then takes its time from this process, however many cores there are."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def busy_machine() -> Iterator[None]:
    """Two processes that take as much of a core as this one each, and end after a minute whatever happens."""
    if HAS_AFFINITY:
        with on_one_core(), _spinning(2):
            yield
    else:
        with _spinning(2 * (psutil.cpu_count() or 1)):
            yield


@contextmanager
def _spinning(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
