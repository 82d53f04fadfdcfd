"""How a process uses its machine: how many threads, and what becomes of memory that it has freed."""

from __future__ import annotations

import ctypes
import platform

import torch

_TRIM, _MMAP = -1, -3
"""Names of glibc's mallopt: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD."""
_LARGEST_BYTES = 32 * 2**20
"""The most that glibc takes for M_MMAP_THRESHOLD: larger tensors always come from the system, and go back to it."""
_KEPT_BYTES = 2 * _LARGEST_BYTES


def configure_process(threads: int) -> None:
    """Take so many threads, and keep freed memory: how training, profiling and measuring run."""
    torch.set_num_threads(threads)
    keep_heap_memory()


def keep_heap_memory() -> None:
    """Keep up to 64 MiB at the top of the heap for the next tensors.

    Left to itself glibc gives memory back to the system and asks for it again at every large tensor, page by page.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_TRIM, _KEPT_BYTES)
        libc.mallopt(_MMAP, _LARGEST_BYTES)
