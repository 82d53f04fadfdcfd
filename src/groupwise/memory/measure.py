"""Measured memory: of the accelerator, or of the process where there is none; and of the host."""

from __future__ import annotations

import os
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class Ranks(Protocol):
    def max(self, *numbers: float) -> Sequence[float]: ...


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes of one step, of the rank with the highest peak. All are measured except the prediction."""

    peak: int
    """Peak of what was allocated on the device during the step; on the CPU, peak of the process."""
    current: int
    """Allocated at the end of the step."""
    device: int
    """Total memory of the device."""
    host: int
    """Resident memory of the process."""
    predicted: int | None = None
    """Peak by the memory plan."""

    @property
    def utilization(self) -> float:
        return self.peak / self.device

    @property
    def error(self) -> float | None:
        """Relative error of the prediction: 0.1 when it was a tenth too high."""
        return None if self.predicted is None else self.predicted / self.peak - 1

    def to_dict(self) -> dict[str, float]:
        """As in metrics.jsonl."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        error = {} if self.error is None else {"prediction_error": self.error}
        return {**known, "utilization": self.utilization, **error}


class PeakMemory:
    """Peak memory since its construction."""

    def __init__(self, device: torch.device):
        self._device = device
        if device.type == "cpu":
            _reset_process_peak()
        else:
            torch.accelerator.reset_peak_memory_stats(device)

    def over_ranks(self, ranks: Ranks, predicted: int | None = None) -> MemoryUsage:
        """The peak until now, of the rank where it is highest."""
        host = int(psutil.Process().memory_info().rss)
        on_cpu = self._device.type == "cpu"
        peak = _process_peak(host) if on_cpu else int(torch.accelerator.max_memory_allocated(self._device))
        current = host if on_cpu else used_bytes(self._device)
        peak, current, host = (int(number) for number in ranks.max(float(peak), float(current), float(host)))
        return MemoryUsage(peak, current, device_bytes(self._device), host, predicted)


def used_bytes(device: torch.device) -> int:
    """Bytes that are allocated on the device now; on the CPU, resident memory of this process."""
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss)
    return int(torch.accelerator.memory_allocated(device))


def device_bytes(device: torch.device) -> int:
    """Total memory of the device. On the CPU, ranks of one machine share its RAM, or the limit set for them."""
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
    """Linux keeps a peak per process and resets it on request. Elsewhere the current memory is used instead."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return


def _process_peak(current: int) -> int:
    try:
        with open("/proc/self/status") as file:
            lines = file.read().splitlines()
    except OSError:
        return current
    peak = next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), current)
    return max(peak, current)
