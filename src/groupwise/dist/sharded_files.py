"""Which rows of a sharded tensor a rank writes into its file of a checkpoint, and which it reads, on any ranks.

Files are in the format of torch.distributed.checkpoint's safetensors storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from groupwise.core.io.tensor_files import TensorFiles
from groupwise.dist.sharding import local


@dataclass(frozen=True)
class HostCopy:
    """Tensors to be written: in host memory of their own, so that training may change what they were copied from.

    Or, where that did not fit, the tensors themselves.
    """

    tensors: Mapping[str, Tensor]
    offsets: Mapping[str, list[int]] | None = None
    """Where each begins within its whole tensor; None for whole tensors."""


def copy_to_host(tensors: Mapping[str, Tensor], *, copy: bool = True) -> HostCopy:
    """Of whole tensors."""
    return HostCopy({name: _own_rows(tensor, copy=copy) for name, tensor in tensors.items()})


def copy_part_to_host(
    tensors: Mapping[str, Tensor], placed_as: Mapping[str, Tensor], *, is_main: bool, copy: bool = True
) -> HostCopy:
    """This rank's rows of sharded tensors, where it is in the first copy of them; the first rank also those of others.

    `placed_as`: sharded tensors by the names of those of which a rank has its rows as a plain tensor.
    """
    own: dict[str, Tensor] = {}
    offsets: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        placed = placed_as.get(name, tensor)
        rows = rows_of(placed)
        if (rows is None and is_main) or (rows is not None and (rows.stop > rows.start) and _is_first_copy(placed)):
            own[name] = _own_rows(tensor, copy=copy)
            offsets[name] = [rows.start if rows else 0, *[0] * (tensor.ndim - 1)][: tensor.ndim]
    return HostCopy(own, offsets)


def part_name(rank: int) -> str:
    """The file of one rank."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def rows_of(tensor: Tensor) -> slice | None:
    """Rows of the whole tensor that are this rank's part; None for a tensor that is not sharded."""
    if not isinstance(tensor, DTensor):
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(shape[1:]) == tuple(tensor.shape[1:]), "sharded by rows"
    return slice(offset[0], offset[0] + shape[0])


@torch.no_grad()
def read_into(target: Tensor, files: TensorFiles, name: str, *, placed_as: Tensor | None = None) -> None:
    """Fill a tensor, or this rank's part of it, from the same rows in files.

    `placed_as`: a sharded tensor of which the target is this rank's part, as a plain tensor.
    """
    local(target).copy_(files.read(name, rows_of(target if placed_as is None else placed_as)))


def _own_rows(tensor: Tensor, *, copy: bool) -> Tensor:
    rows = local(tensor.detach())
    return rows.to("cpu", copy=True).contiguous() if copy else rows


def _is_first_copy(tensor: Tensor) -> bool:
    """False on the ranks of other nodes that hold the same rows."""
    assert isinstance(tensor, DTensor)
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    return all(
        index == 0 for index, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    )
