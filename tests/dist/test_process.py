"""CPU threads and freed memory of a process."""

import platform
import resource
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from groupwise.dist.process import configure_process
configure_process(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for size in range(12, 31):
    torch.ones(size * 2**18)  # MiB, each larger than any that was freed before
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, torch.get_num_threads())
"""


def faults() -> tuple[int, int]:
    ended = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120, check=True)
    count, threads = map(int, ended.stdout.split())
    return count, threads


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_freed_memory_is_kept_for_the_next_tensor_and_threads_are_set():
    count, threads = faults()
    assert threads == 1
    pages = sum(range(12, 31)) * 2**20 // resource.getpagesize()
    assert count < pages / 2  # by default it is all of them
