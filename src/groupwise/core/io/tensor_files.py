"""Tensors in safetensors files: written piece by piece with a hash, read as rows of the first axis.

Nothing is mapped into memory and nothing is read but the rows that are asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from groupwise.core.errors import UserError
from groupwise.core.io.files import open_regular, parse_json, write_synced

PIECES_KEY = "DCP_SHARDING_INFO"
"""In a file's metadata: where its tensors begin within whole ones, as torch writes distributed checkpoints."""
_CHUNK_BYTES = 16 << 20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPE_OF = {name: dtype for dtype, name in _DTYPES.items()}


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    offsets: Mapping[str, list[int]] | None = None,
    proceed: Callable[[], None] = lambda: None,
) -> str:
    """Write a new file of tensors, and wait until the disk has it. Returns its SHA-256.

    `offsets`: where each tensor begins within a whole one. `proceed` is called often; what it raises ends the writing.
    """
    digest = hashlib.sha256()

    def chunks() -> Iterator[bytes | memoryview]:
        for chunk in _file_chunks(tensors, offsets):
            proceed()
            digest.update(chunk)
            yield chunk

    write_synced(path, chunks())
    return digest.hexdigest()


def _file_chunks(
    tensors: Mapping[str, Tensor], offsets: Mapping[str, list[int]] | None
) -> Iterator[bytes | memoryview]:
    """The header, padded so that all numbers are aligned, and the tensors, those of the largest numbers first."""
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if offsets is not None:
        pieces = {name: {"saved_offsets": offsets[name]} for name in names}
        header["__metadata__"] |= {PIECES_KEY: json.dumps(pieces), "DCP_VERSION": "1.0"}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        entry = {"dtype": _DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape)}
        header[name] = entry | {"data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        content = _memory(tensors[name].cpu().contiguous())
        yield from (content[start : start + _CHUNK_BYTES] for start in range(0, len(content), _CHUNK_BYTES))


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host."""
    numbers: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


@dataclass(frozen=True)
class _Piece:
    """A tensor of a file: a whole one, or some rows of it."""

    path: Path
    dtype: torch.dtype
    shape: torch.Size
    begin: int
    """Of its bytes in the file."""
    first_row: int = 0

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return self.shape[1:].numel() * self.dtype.itemsize


class TensorFiles:
    """The tensors of some files by name, of which some may lie in several files, some rows in each."""

    def __init__(self, files: Iterable[tuple[Path, str]]):
        """Files, each with what its names begin with here."""
        self._pieces: dict[str, list[_Piece]] = {}
        for path, prefix in files:
            for name, piece in _pieces_of(path):
                self._pieces.setdefault(prefix + name, []).append(piece)
        for name, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece.first_row)
            _refuse_gaps(name, pieces)

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def shape(self, name: str) -> torch.Size:
        """Of the whole tensor."""
        pieces = self._pieces[name]
        return (
            torch.Size([sum(piece.rows for piece in pieces), *pieces[0].shape[1:]]) if pieces[0].shape else torch.Size()
        )

    def dtype(self, name: str) -> torch.dtype:
        return self._pieces[name][0].dtype

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A whole tensor, or these of its rows."""
        shape = self.shape(name)
        total = shape[0] if shape else 1
        first, last = (0, total) if rows is None else (rows.start, rows.stop)
        assert 0 <= first <= last <= total, "rows of the tensor"
        result = torch.empty([last - first, *shape[1:]], dtype=self.dtype(name))
        for piece in self._pieces[name]:
            begin, end = max(first, piece.first_row), min(last, piece.first_row + piece.rows)
            if begin < end and piece.row_bytes:
                _read_into(result[begin - first : end - first], piece, begin - piece.first_row)
        return result if shape else result.reshape(())


def _read_into(target: Tensor, piece: _Piece, first: int) -> None:
    with open_regular(piece.path) as file:
        file.seek(piece.begin + first * piece.row_bytes)
        if file.readinto(_memory(target)) != target.nbytes:
            raise UserError(f"{piece.path} ends before its last tensor does. Restore it.")


def _pieces_of(path: Path) -> Iterator[tuple[str, _Piece]]:
    header, data_begins = _read_header(path)
    try:
        offsets = parse_json(header.get("__metadata__", {}).get(PIECES_KEY, "{}").encode())
        if not isinstance(offsets, dict):
            raise ValueError(f"{PIECES_KEY} is no object")
        for name, entry in header.items():
            if name != "__metadata__":
                first_row, *others = offsets[name]["saved_offsets"] or [0] if name in offsets else [0]
                if any(others) or type(first_row) is not int or entry["dtype"] not in _DTYPE_OF:
                    raise ValueError(f"'{name}' is of a kind that is not written here")
                begin = data_begins + entry["data_offsets"][0]
                yield name, _Piece(path, _DTYPE_OF[entry["dtype"]], torch.Size(entry["shape"]), begin, first_row)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no tensors that can be read ({error}). Restore it.") from error


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, which safetensors has checked against the file's size, and where the tensors begin."""
    with open_regular(path) as file:
        try:
            safe_open(path, framework="pt").__exit__(None, None, None)
        except SafetensorError as error:
            raise UserError(f"{path} holds no tensors ({error}). Restore it.") from error
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def _refuse_gaps(name: str, pieces: list[_Piece]) -> None:
    """Pieces of one tensor follow each other; torch's own reader leaves what is missing as it was."""
    following = 0
    for piece in pieces:
        same = (piece.dtype, len(piece.shape), piece.shape[1:]) == (
            pieces[0].dtype,
            len(pieces[0].shape),
            pieces[0].shape[1:],
        )
        if piece.first_row != following or not same:
            raise UserError(
                f"{piece.path}: the rows of '{name}' in these files do not follow each other. Restore them."
            )
        following += piece.rows
