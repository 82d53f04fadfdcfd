"""Which errors mean that memory ran out."""

import pytest
import torch

from groupwise.core.errors import UserError, is_out_of_memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NPU out of memory. Tried to allocate 20.00 MiB"), True),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (UserError("We are out of memory jokes."), False),
        (None, False),
    ],
)
def test_which_errors_are_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def test_an_out_of_memory_error_inside_another_is_found():
    outer = KeyError("wrapped")
    outer.__cause__ = MemoryError()
    assert is_out_of_memory(outer)
