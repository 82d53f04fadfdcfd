"""Which machine a latency belongs to."""

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
    """That torch uses."""
    torch: str
    device: str

    def differences(self, other: Machine) -> dict[str, str]:
        """By name, what is not the same: 'threads': '1, not 2'."""
        mine, others = asdict(self), asdict(other)
        return {name: f"{mine[name]}, not {others[name]}" for name in mine if mine[name] != others[name]}


def current_machine() -> Machine:
    return Machine(_cpu(), psutil.cpu_count() or 1, torch.get_num_threads(), torch.__version__, _device())


def _cpu() -> str:
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    name = getattr(torch.get_device_module(accelerator), "get_device_name", None)
    return str(name()) if name else accelerator.type
