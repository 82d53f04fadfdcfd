"""The default device, and what a device can do."""

from __future__ import annotations

import torch


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def reduce_dtype(device: torch.device) -> torch.dtype:
    """float64 where the device has it (not on mps and npu)."""
    return torch.float32 if device.type in ("mps", "npu") else torch.float64


def has_fused_adamw(device: torch.device) -> bool:
    """Whether torch has a kernel that does the whole AdamW step in one pass over memory."""
    return device.type in ("cpu", "cuda")
