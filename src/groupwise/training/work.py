"""WorkTimer: seconds that this rank works in each stage of a step, before it waits for the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

STAGES = ("rollout", "reward", "update")


class WorkTimer:
    """Time inside a sharded update includes waiting: its passes keep the ranks in step."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the time inside to this stage."""
        start = time.perf_counter()
        yield
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._seconds[stage] += time.perf_counter() - start

    def take(self) -> list[float]:
        """The seconds of all stages since the last call."""
        seconds = list(self._seconds.values())
        self._seconds = dict.fromkeys(STAGES, 0.0)
        return seconds
