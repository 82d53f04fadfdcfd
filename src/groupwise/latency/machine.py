"""Which machine a latency was measured on."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch


@dataclass(frozen=True)
class Machine:
    """What decides how long the same work takes."""

    cpu: str
    cores: int
    threads: int
    """CPU threads that torch uses."""
    torch: str
    """Version of torch."""
    device: str

    def differences(self, other: Machine) -> dict[str, str]:
        """The fields that differ, such as 'threads': '1, not 2'."""
        values, other_values = asdict(self), asdict(other)
        return {
            name: f"{values[name]}, not {other_values[name]}" for name in values if values[name] != other_values[name]
        }


def current_machine() -> Machine:
    return Machine(_cpu(), psutil.cpu_count() or 1, torch.get_num_threads(), torch.__version__, _device())


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    name = getattr(torch.get_device_module(accelerator), "get_device_name", None)
    return str(name()) if name else accelerator.type
