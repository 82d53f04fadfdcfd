"""StepTimer: seconds of each stage of a step, of this rank's own work and with waiting for the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

STAGES = ("rollout", "reward", "update")


class StepTimer:
    """The device is waited for once in each stage, at the end of its work.

    What follows the work of a stage is on the host; an update reads the norm of its new weights at its end. Work inside
    a sharded update includes waiting: its passes keep the ranks in step.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A step begins."""
        self.work = dict.fromkeys(STAGES, 0.0)
        self.total = dict.fromkeys(STAGES, 0.0)
        self._last = time.perf_counter()

    @contextmanager
    def measure_work(self, stage: str) -> Iterator[None]:
        """Add the time inside to this rank's work in this stage."""
        start = time.perf_counter()
        yield
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.work[stage] += time.perf_counter() - start

    def end(self, stage: str) -> None:
        """Add the time since the end of the last stage to this one."""
        now = time.perf_counter()
        self.total[stage] += now - self._last
        self._last = now
