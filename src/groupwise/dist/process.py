"""Settings of this process: CPU threads, and glibc's malloc."""

from __future__ import annotations

import ctypes
import platform

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
_MMAP_BYTES = 32 * 2**20
"""The largest value that glibc takes for M_MMAP_THRESHOLD: larger tensors are always mapped and unmapped."""
_KEPT_BYTES = 2 * _MMAP_BYTES


def configure_process(threads: int) -> None:
    """Set CPU threads and keep freed heap memory, as training, profiling and measuring all do."""
    torch.set_num_threads(threads)
    keep_heap_memory()


def keep_heap_memory() -> None:
    """Keep up to 64 MiB of freed heap for the next tensors, and what is free between others.

    By default glibc returns memory to the system and faults it in again, page by page, for every large tensor.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
