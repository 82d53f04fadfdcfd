"""The device of a rank, and modules on their way to it. On an accelerator: tests/accelerator."""

import pytest
import torch
from torch import nn

from groupwise.cli.main import main
from groupwise.core.errors import UserError
from groupwise.core.transfer import send, send_list
from groupwise.dist.comm import connect
from groupwise.dist.devices import choose_device, host_syncs, move_module, require_dtype, traits

CPU = torch.device("cpu")


def test_a_device_that_is_not_there_is_refused_in_one_paragraph_with_exit_code_2(tmp_path, capsys):
    arguments = ["train", "examples/doors.py", "--device", "warp", "--run-dir", str(tmp_path / "run")]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert "device is 'warp', which torch cannot use here. It has cpu" in message
    assert "\n\n" not in message.strip()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["cuda:x", "meta", ""])
def test_what_is_no_device_is_refused(name):
    with pytest.raises(UserError, match=f"device is '{name}'"):
        choose_device(name)


def test_the_cpu_can_always_be_named():
    assert choose_device("cpu") == connect("cpu").device == CPU
    assert host_syncs(CPU) is None
    require_dtype(CPU, "float64", "policy.dtype")
    assert not traits(torch.device("meta")).has_float64  # nothing is known of it


def test_world_size_without_a_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"WORLD_SIZE is 2, but RANK.* is not set"):
        connect("cpu")


def test_a_moved_module_keeps_its_ties_dtypes_and_order():
    module = nn.ModuleDict({"first": nn.Linear(2, 3), "second": nn.Linear(2, 3)})
    module["second"].weight = module["first"].weight
    names = [name for name, _ in module.named_parameters()]
    moved = move_module(module, "meta")
    assert moved["second"].weight is moved["first"].weight
    assert [name for name, _ in moved.named_parameters()] == names


def test_tensors_stay_where_they_are_sent():
    values = torch.arange(3)
    assert send(values, CPU) is values
    assert send_list([4, 5], CPU).tolist() == [4, 5]
    assert send_list([], CPU).dtype == torch.int64
