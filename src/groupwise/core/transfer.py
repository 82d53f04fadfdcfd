"""Tensors from the host to a device without waiting for what the device is doing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device: through pinned memory and not blocking, where the device is not the CPU itself."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def send_list(values: Sequence[int], device: torch.device) -> Tensor:
    """Integers as a tensor on the device. `torch.tensor(..., device=...)` would wait for the device."""
    return send(torch.tensor(values, dtype=torch.int64), device)
