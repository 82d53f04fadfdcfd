"""The device of a rank, what a type of device lacks, and modules on their way to it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from groupwise.core.errors import UserError, is_out_of_memory

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True)
class DeviceTraits:
    """What cannot be asked of torch without trying it. The defaults are those of a type that is not in `TRAITS`."""

    has_float64: bool = False
    fused_adamw: bool = False
    """torch has a kernel that does the whole AdamW step in one pass over memory."""
    compiles_attention: bool = False
    """torch.compile makes one kernel of flex attention and its mask."""
    copies_from_pinned: bool = False
    """Host memory can be pinned, from which copies to the device are faster."""


TRAITS = {
    "cpu": DeviceTraits(has_float64=True, fused_adamw=True),
    "cuda": DeviceTraits(has_float64=True, fused_adamw=True, compiles_attention=True, copies_from_pinned=True),
    "xpu": DeviceTraits(has_float64=True, copies_from_pinned=True),
    "mps": DeviceTraits(),
    "npu": DeviceTraits(),
}


def traits(device: torch.device) -> DeviceTraits:
    return TRAITS.get(device.type, DeviceTraits())


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def choose_device(name: str | None = None) -> torch.device:
    """The device of this rank: of the named type, else of the type that torch reports; the CPU where it reports none.

    Ranks of one machine take its devices in turn.
    """
    device = default_device() if name is None else _named_device(name)
    if device.type == "cpu":
        return torch.device("cpu")
    count, shared_by = torch.accelerator.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.index is not None and name is not None and (device.index >= count or shared_by > 1):
        rule = "all ranks of this machine would share it" if shared_by > 1 else f"there are {count} here, from 0"
        raise UserError(f"device is {name!r}: {rule}. Name the type alone: --device {device.type}.")
    index = device.index if name is not None and device.index is not None else _local_rank() % count
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def _named_device(name: str) -> torch.device:
    usable = dict.fromkeys(("cpu", default_device().type))
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in usable:
        raise UserError(
            f"device is {name!r}, which torch cannot use here. It has {' and '.join(usable)}: name one of them, or"
            " leave --device out."
        )
    return device


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def require_dtype(device: torch.device, dtype: str, setting: str) -> None:
    """Refuse float64 on a device that may not have it; one that nothing is known of is asked."""
    if dtype != "float64" or traits(device).has_float64:
        return
    try:
        torch.zeros(1, dtype=torch.float64, device=device).add_(1)
    except (TypeError, RuntimeError) as error:
        raise UserError(
            f"{setting} is float64, which the device {device} does not have ({str(error).splitlines()[0]}). Take"
            " float32, or --device cpu."
        ) from error


def move_module(module: ModuleT, device: torch.device | str) -> ModuleT:
    """`module.to(device)` with tied parameters and buffers still tied.

    For devices that plugins add to torch, `Module.to` makes a new parameter for each place where a tied one is used:
    they would be trained apart.
    """
    ties, count = names_by_tensor(module), sum(1 for _ in module.parameters())
    module.to(device)
    for first, *others in ties:
        owner, _, name = first.rpartition(".")
        kept = getattr(module.get_submodule(owner), name)
        for other in others:
            owner, _, name = other.rpartition(".")
            setattr(module.get_submodule(owner), name, kept)
    assert sum(1 for _ in module.parameters()) == count, "as many parameters after the move as before"
    return module


def names_by_tensor(module: nn.Module) -> list[list[str]]:
    """Names of each parameter and buffer that has more than one."""
    names: dict[int, list[str]] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def is_lost(device: torch.device) -> bool:
    """Whether the device does not compute any more: after a failed kernel every further call of a process raises.

    It is asked, since each type of device has other words for it in its errors.
    """
    if device.type == "cpu":
        return False
    try:
        return torch.ones(1, device=device).add(1).item() != 2
    except RuntimeError as error:
        return not is_out_of_memory(error)


def host_syncs(device: torch.device) -> int | None:
    """How often the host has waited for the device so far, where the device's module counts it; else None."""
    if device.type == "cpu":
        return None
    counter = getattr(torch.get_device_module(device), "host_syncs", None)
    return None if counter is None else int(counter())
