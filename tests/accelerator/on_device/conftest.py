"""The device under test: the emulated accelerator, or a real one that GROUPWISE_TEST_DEVICE names."""

import os

import pytest
import torch

from accelerator import emulated

NAME = os.environ.get("GROUPWISE_TEST_DEVICE", "")  # without it nothing here is collected
EMULATED = emulated.register() if NAME == emulated.NAME else None


@pytest.fixture
def device() -> torch.device:
    return torch.device(NAME)


@pytest.fixture
def counters():
    """What the emulated device counts, from zero; and no limit of its memory afterwards."""
    if EMULATED is None:
        pytest.skip(f"{NAME} does not count kernels and host synchronizations")
    EMULATED.reset_counters()
    yield EMULATED
    EMULATED.set_memory_limit(0)
