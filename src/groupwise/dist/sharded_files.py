"""Sharded tensors in safetensors files, a part from each rank, by torch.distributed.checkpoint; read on any number of
ranks. Who reads them must first check that no part is missing: torch loads what is there and leaves the rest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from groupwise.core.io.files import sync_folder


def save_parts(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, str]:
    """Write this rank's parts, and one copy of what is not sharded. The hashes of this rank's files, by name.

    A collective: the folder must be empty, and one that all ranks see.
    """
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    state_dict_saver.save({name: tensor.detach() for name, tensor in tensors.items()}, storage_writer=writer)
    own = folder.glob(f"shard-{dist.get_rank() + 1:05d}-*.safetensors")
    return {path.name: _sync_and_hash(path) for path in own}


def load_parts(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the tensors, sharded or whole, from the parts. A collective where several ranks run."""
    state_dict_loader.load(dict(tensors), storage_reader=HuggingFaceStorageReader(path=str(folder)))


def shapes_in_parts(folder: Path) -> dict[str, torch.Size]:
    """The shapes of the whole tensors, by name."""
    metadata = HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata
    return {name: torch.Size(entry.size) for name, entry in metadata.items() if hasattr(entry, "size")}


def _sync_and_hash(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    sync_folder(path.parent)
    return digest
