"""Parts of a pipeline are on the device only while they are used."""

import pytest
import torch

from groupwise.workloads.flow.models.pipeline_folder import on_device


class MovedModule(torch.nn.Module):
    """Records the devices that it is moved to."""

    def __init__(self):
        super().__init__()
        self.devices = []

    def to(self, device):
        self.devices.append(str(device))
        return self


def test_a_part_leaves_the_device_even_when_its_use_fails():
    part = MovedModule()

    def use():
        with on_device(torch.device("meta"), part, None):
            assert part.devices == ["meta"]
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        use()
    assert part.devices == ["meta", "cpu"]
