"""Memory in use, measured: of the device where there is one, of the process otherwise."""

from __future__ import annotations

import psutil
import torch


def used_bytes(device: torch.device) -> int:
    """What is allocated on the device now; on the CPU, what this process holds in RAM."""
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss)
    return int(torch.accelerator.memory_allocated(device))


def readable(size: float) -> str:
    """A number of bytes as people read it: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
