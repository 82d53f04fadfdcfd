"""The emulated device behaves as an accelerator does, and counts."""

import pytest
import torch
from torch import nn

from accelerator import emulated
from groupwise.core.errors import UserError
from groupwise.core.randomness import normal
from groupwise.core.transfer import send
from groupwise.dist.devices import choose_device, default_device, host_syncs, move_module, require_dtype


def test_torch_reports_it_and_groupwise_takes_it(device):
    assert torch.accelerator.current_accelerator(check_available=True).type == device.type
    assert default_device().type == device.type
    assert choose_device().type == device.type
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["warp", "meta", "hpu"])
def test_a_device_that_is_not_there_is_refused_with_what_there_is(device, name):
    with pytest.raises(UserError, match=rf"device is '{name}'.*cpu and {device.type}"):
        choose_device(name)


def test_an_index_that_is_not_there_is_refused(device):
    with pytest.raises(UserError, match=rf"device is '{device.type}:99'.*--device {device.type}"):
        choose_device(f"{device.type}:99")


def test_mixing_it_with_cpu_tensors_raises(device):
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device=device) + torch.ones(2)


def test_memory_is_counted_and_limited(device, counters):
    before = torch.accelerator.memory_allocated(device)
    held = torch.zeros(1000, device=device)
    assert torch.accelerator.memory_allocated(device) - before == 4000
    summed = held + 1  # the result of a kernel counts as well
    assert torch.accelerator.memory_allocated(device) - before == 8000
    view = summed.view(10, 100)[1:]
    assert torch.accelerator.memory_allocated(device) - before == 8000
    counters.set_memory_limit(before + 9000)
    with pytest.raises(torch.OutOfMemoryError, match="4000 bytes were asked for"):
        held * 2
    del held, summed, view
    assert torch.accelerator.memory_allocated(device) == before
    assert torch.accelerator.max_memory_allocated(device) >= before + 8000


def test_what_makes_the_host_wait_is_counted(device, counters):
    values = torch.arange(4.0, device=device)
    counters.reset_counters()
    assert values.sum().item() == 6  # one wait for the value
    assert (values > 1).nonzero().flatten().tolist() == [2, 3]  # for the size, and for the values
    values[torch.tensor([True, False, True, False]).to(device)] = values[:2]  # the mask is sent, and counted
    assert counters.counters()["host_syncs"] == host_syncs(device) == 5
    send(torch.ones(8), device)  # pinned and not blocking
    assert host_syncs(device) == 5
    assert counters.counters()["bytes_to_device"] == 4 + 32


def test_outputs_given_to_a_kernel_are_written(device):
    buffer = torch.empty(4, device=device)
    joined = torch.cat([torch.ones(1, device=device), torch.zeros(2, device=device)], out=buffer[:3])
    assert joined.tolist() == buffer[:3].tolist() == [1, 0, 0]


def test_autograd_and_adamw_are_the_cpus(device):
    def train(where: torch.device) -> torch.Tensor:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 5)).double().to(where)
        optimizer = torch.optim.AdamW(layers.parameters())
        inputs = torch.rand(3, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(where)
        for _ in range(3):
            optimizer.zero_grad()
            layers(inputs).logsumexp(-1).mean().backward()
            optimizer.step()
        return torch.cat([weight.detach().cpu().flatten() for weight in layers.parameters()])

    torch.testing.assert_close(train(device), train(torch.device("cpu")), rtol=0, atol=1e-12)


def test_bfloat16_products_under_autocast(device):
    layer = nn.Linear(4, 3).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        assert layer(torch.ones(2, 4, device=device)).dtype == torch.bfloat16


def test_tied_weights_stay_tied_when_a_module_moves(device):
    """`Module.to` makes a new parameter for each place of a tied one on a device of a plugin."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("scale", torch.ones(1))
            self.again = nn.Module()
            self.again.register_buffer("scale", self.scale)

    moved = move_module(Tied(), device)
    assert moved.head.weight is moved.embedding.weight
    assert moved.again.scale is moved.scale
    assert sum(1 for _ in moved.parameters()) == 1
    assert {tensor.device.type for tensor in moved.state_dict().values()} == {device.type}
    back = move_module(moved, "cpu")
    assert back.head.weight is back.embedding.weight
    if device.type == emulated.NAME:
        plain = Tied().to(device)
        assert plain.head.weight is not plain.embedding.weight


def test_keyed_randomness_is_the_same_on_the_device(device):
    keys = torch.arange(6)
    assert torch.equal(normal(1, 2, keys.to(device), 3), normal(1, 2, keys, 3))


def test_float64_is_asked_of_the_device(device):
    if device.type == emulated.NAME:
        require_dtype(device, "float64", "policy.dtype")  # it has it
    require_dtype(device, "float32", "policy.dtype")
