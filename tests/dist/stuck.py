"""The tiny workload with a reward that never returns from foreign code, and one that is only slow."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass, replace
from typing import Literal

import fakes
import torch

import groupwise as gw


class StuckWorkload(fakes.TinyWorkload):
    """In the third step of a process, so that it can be resumed."""

    calls = 0

    def rewards(self, rollouts: gw.Rollouts) -> gw.RewardTerms:
        self.calls += 1
        rank = int(os.environ.get("RANK", "0"))
        if self.calls > 2 and rank == self.config.rank:
            self.wait()
        return super().rewards(rollouts)

    def wait(self) -> None:
        libraries = {"foreign code": ctypes.CDLL, "locked": ctypes.PyDLL}  # the second keeps the interpreter's lock
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2 if self.config.how in libraries else 0):  # the second time for ever, whatever signals come
            libraries[self.config.how](None).pthread_mutex_lock(mutex)
        until = time.monotonic() + 6
        while self.config.how == "slow" and time.monotonic() < until:
            sum(range(1000))


@dataclass(frozen=True)
class StuckConfig(fakes.TinyConfig):
    how: Literal["foreign code", "locked", "slow"] = "foreign code"
    rank: int = 0

    def build(self, device: torch.device) -> StuckWorkload:
        return StuckWorkload(self, device)


def recipe() -> gw.Config:
    config = fakes.recipe()
    run = replace(config.run, preflight=False, checkpoint_every=100, rank_timeout_s=4.0)
    return replace(config, workload=StuckConfig(), steps=4, run=run)
