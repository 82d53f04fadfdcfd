"""Encodings on the disk, by a hash of all that they depend on: shared by ranks and runs, the oldest dropped first."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load, save
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.groups import content_hash
from groupwise.core.io.files import read_bytes
from groupwise.data.file_hash import replace_file

Encoding = Mapping[str, Tensor]
_CHECKSUM = "checksum"
_ABANDONED_S = 3600.0
"""A file that was being written, and has not changed for so long, was left behind by a crash."""


class EncodingStore:
    """A folder of .safetensors files of at most `max_bytes` together; those not used for longest are deleted."""

    def __init__(self, folder: Path, max_bytes: int):
        self.folder, self._max_bytes = folder, max_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"Encodings cannot be kept in {folder} ({error.strerror}). Name another folder in $GROUPWISE_CACHE, or"
                " set workload.encoding_cache_gib to 0, which keeps none."
            ) from error

    def read(self, key: str) -> Encoding | None:
        """The encoding of this key; None where there is none. A damaged file is deleted, with a warning."""
        path = self._path(key)
        try:
            tensors = load(read_bytes(path, max_bytes=self._max_bytes))
            intact = tensors.pop(_CHECKSUM).numpy().tobytes() == _checksum(tensors)
        except (UserError, KeyError, ValueError, safetensors.SafetensorError) as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            intact = False
        if not intact:
            warnings.warn(f"{path} is damaged: it is deleted and encoded again.", stacklevel=2)
            path.unlink(missing_ok=True)
            return None
        with suppress(FileNotFoundError):  # another process has just dropped it
            os.utime(path)
        return tensors

    def write(self, key: str, encoding: Encoding) -> None:
        tensors = {name: column.detach().cpu().contiguous() for name, column in encoding.items()}
        checksum = torch.frombuffer(bytearray(_checksum(tensors)), dtype=torch.uint8)
        content = save({**tensors, _CHECKSUM: checksum})
        if len(content) <= self._max_bytes:
            replace_file(self._path(key), content)
            self._drop_oldest()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _drop_oldest(self) -> None:
        """Until the rest fits. Other processes may do the same at the same time."""
        files = []
        for entry in os.scandir(self.folder):
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if entry.name.endswith(".safetensors"):
                files.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
            elif entry.name.startswith(".") and time.time() - status.st_mtime > _ABANDONED_S:
                Path(entry.path).unlink(missing_ok=True)
        excess = sum(size for _, size, _ in files) - self._max_bytes
        for _, size, path in sorted(files):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size


class CachedEncoder:
    """Encodes what the store does not have yet; equal contents once."""

    def __init__(self, store: EncodingStore | None, identity: Callable[[], str]):
        """`identity` names the encoder: a hash of its weights and settings. Without a store it is not called."""
        self._store, self._identity = store, identity
        self._identity_hash: str | None = None

    def encode(self, contents: Sequence[str], encode: Callable[[int], Encoding]) -> list[Encoding]:
        """The encodings of these contents; `encode` makes that of a row.

        One row at a time: in a batch an encoding is rounded differently, and a kept one would depend on its neighbors.
        """
        used: dict[str, Encoding] = {}
        for row, content in enumerate(contents):
            if content not in used:
                used[content] = self._read(content) or self._make(content, encode(row))
        return [used[content] for content in contents]

    def _make(self, content: str, encoding: Encoding) -> Encoding:
        if self._store is not None:
            self._store.write(self._key(content), encoding)
        return encoding

    def _read(self, content: str) -> Encoding | None:
        return self._store.read(self._key(content)) if self._store is not None else None

    def _key(self, content: str) -> str:
        if self._identity_hash is None:
            self._identity_hash = self._identity()
        return content_hash(f"{self._identity_hash}:", content)


def _checksum(tensors: Encoding) -> bytes:
    parts: list[str | memoryview] = []
    for name in sorted(tensors):
        column = tensors[name]
        parts += [f"{name}{column.dtype}{tuple(column.shape)}", column.reshape(-1).view(torch.uint8).numpy().data]
    return content_hash(*parts).encode()
