"""What a device can do, by its name."""

from __future__ import annotations

import torch


def reduce_dtype(device: torch.device) -> torch.dtype:
    """float64 where the device has it (not on mps and npu)."""
    return torch.float32 if device.type in ("mps", "npu") else torch.float64


def has_fused_adamw(device: torch.device) -> bool:
    """Torch's own kernel takes AdamW's whole step in one pass over memory."""
    return device.type in ("cpu", "cuda")
