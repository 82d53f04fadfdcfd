"""Memory, measured: of the device where there is one, of the process otherwise; and of the host."""

from __future__ import annotations

import os
import resource
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil
import torch

from groupwise.core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MemoryUsage", "PeakMemory", "device_bytes", "format_bytes", "used_bytes"]


class Ranks(Protocol):
    def max(self, *numbers: float) -> Sequence[float]: ...


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes of one step, of the fullest rank. All measured but the prediction."""

    peak: int
    """Highest that was allocated on the device during the step; on the CPU, what the process held at most."""
    current: int
    """Allocated when the step was done."""
    device: int
    """What the device has in all."""
    host: int
    """What the process holds in RAM."""
    predicted: int | None = None
    """The plan's peak."""

    @property
    def utilization(self) -> float:
        return self.peak / self.device

    @property
    def error(self) -> float | None:
        """Of the prediction: 0.1 when it was a tenth too high."""
        return None if self.predicted is None else self.predicted / self.peak - 1

    def plain(self) -> dict[str, float]:
        """As metrics.jsonl holds it."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        error = {} if self.error is None else {"prediction_error": self.error}
        return {**known, "utilization": self.utilization, **error}


class PeakMemory:
    """Begins to watch the device; a step's peak is what it saw since."""

    def __init__(self, device: torch.device):
        self._device = device
        if device.type == "cpu":
            _reset_process_peak()
        else:
            torch.accelerator.reset_peak_memory_stats(device)

    def over_ranks(self, ranks: Ranks, predicted: int | None = None) -> MemoryUsage:
        """What was seen until now, on the fullest rank."""
        host = int(psutil.Process().memory_info().rss)
        on_cpu = self._device.type == "cpu"
        peak = _peak_of_process(host) if on_cpu else int(torch.accelerator.max_memory_allocated(self._device))
        current = host if on_cpu else used_bytes(self._device)
        highest = [int(number) for number in ranks.max(float(peak), float(current), float(host))]
        here = MemoryUsage(highest[0], highest[1], device_bytes(self._device), highest[2])
        return replace(here, predicted=predicted)


def used_bytes(device: torch.device) -> int:
    """What is allocated on the device now; on the CPU, what this process holds in RAM."""
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss)
    return int(torch.accelerator.memory_allocated(device))


def device_bytes(device: torch.device) -> int:
    """All the memory that the device has. The processes of one machine share its RAM, and a limit set for them."""
    if device.type == "cpu":
        limits = [psutil.virtual_memory().total, resource.getrlimit(resource.RLIMIT_AS)[0], _container_limit()]
        return min(limit for limit in limits if limit > 0) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    _, total = torch.accelerator.get_memory_info(device)
    return int(total)


def _container_limit() -> int:
    """0 where there is none."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return int(text) if text.isdigit() else 0


def _reset_process_peak() -> None:
    """Linux keeps a process's peak, and forgets it on request; where that is not to be had, the present counts."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return


def _peak_of_process(present: int) -> int:
    try:
        with open("/proc/self/status") as file:
            lines = file.read().splitlines()
    except OSError:
        return present
    peak = next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), present)
    return max(peak, present)
