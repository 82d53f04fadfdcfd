"""What a stranger may write into a checkpoint: metadata, parts and tensor files of any kind, with hashes that fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from groupwise.core.io.tensor_files import PIECES_KEY, write_tensors
from groupwise.workloads.checkpoint_files import METADATA_FILE, metadata_hash, open_tensors

DEEP = "[" * 100_000 + "]" * 100_000
PARTS = [f"shard-{number:05d}-model-00001-of-00001.safetensors" for number in (1, 2, 3)]
Header = dict[str, Any]


def change_metadata(checkpoint: Path, change: Callable[[Any], None]) -> None:
    """As a stranger would: with the right hash."""
    metadata = json.loads((checkpoint / METADATA_FILE).read_text())
    change(metadata)
    if isinstance(metadata.get("sha256"), dict):
        metadata["sha256"][METADATA_FILE] = metadata_hash(metadata)
    (checkpoint / METADATA_FILE).write_text(json.dumps(metadata))


def hash_tensor_files(checkpoint: Path) -> None:
    """The metadata gets the hashes of the tensor files that are there."""

    def replace_hashes(metadata: Any) -> None:
        kept = {name: value for name, value in metadata["sha256"].items() if not name.endswith(".safetensors")}
        files = checkpoint.glob("*.safetensors")
        metadata["sha256"] = kept | {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    change_metadata(checkpoint, replace_hashes)


def split_into_parts(checkpoint: Path) -> None:
    """The checkpoint as three ranks of a sharded run would have written it."""
    files = open_tensors(checkpoint)
    tensors = {name: files.read(name) for name in files if files.shape(name)}
    for path in checkpoint.glob("*.safetensors"):
        path.unlink()
    for rank, name in enumerate(PARTS):
        pieces = {key: tensor.tensor_split(len(PARTS))[rank] for key, tensor in tensors.items()}
        pieces = {key: piece for key, piece in pieces.items() if len(piece)}
        before = {key: sum(map(len, tensors[key].tensor_split(len(PARTS))[:rank])) for key in pieces}
        offsets = {key: [before[key], *[0] * (piece.ndim - 1)] for key, piece in pieces.items()}
        write_tensors(checkpoint / name, pieces, offsets=offsets)
    hash_tensor_files(checkpoint)


def rewrite(path: Path, change: Callable[[Header, str], Header | bytes | None], extra: bytes = b"") -> None:
    """Change the header of a tensor file; `change` gets the name of a tensor of two axes, and may return raw bytes."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = next(key for key, entry in header.items() if key != "__metadata__" and len(entry["shape"]) == 2)
    changed = change(header, name)
    text = changed if isinstance(changed, bytes) else json.dumps(changed or header).encode()
    text = text if isinstance(changed, bytes) else len(text).to_bytes(8, "little") + text
    path.write_bytes(text + data + extra)


def with_entry(**fields: Any) -> Callable[[Header, str], Header]:
    """Other fields of one tensor."""
    return lambda header, name: {**header, name: {**header[name], **fields}}


def with_tensor(name: str = "{}.more", **entry: Any) -> Callable[[Header, str], Header]:
    """One more tensor, called after another ({}), without bytes of its own unless it says so."""

    def add(header: Header, other_name: str) -> Header:
        end = max(other["data_offsets"][1] for key, other in header.items() if key != "__metadata__")
        return {**header, name.format(other_name): {"dtype": "F32", "shape": [0], "data_offsets": [end, end], **entry}}

    return add


def with_pieces(pieces: Any) -> Callable[[Header, str], Header]:
    """Other places of the tensors within whole ones."""

    def change(header: Header, name: str) -> Header:
        text = pieces if isinstance(pieces, str) else json.dumps({name: {"saved_offsets": pieces}})
        return {**header, "__metadata__": {**header["__metadata__"], PIECES_KEY: text}}

    return change


def twice(header: Header, name: str) -> bytes:
    """The same name a second time, with another shape for the same bytes."""
    entry = {**header[name], "shape": [1, *header[name]["shape"]]}
    text = (json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(entry)}}}").encode()
    return len(text).to_bytes(8, "little") + text


def raw(length: int, text: bytes = b"{}") -> Callable[[Header, str], bytes]:
    return lambda _header, _name: (length % 2**64).to_bytes(8, "little") + text


def other_dtype(header: Header, name: str) -> Header:
    """As many bytes of whole numbers."""
    return with_entry(dtype={"F64": "I64", "F32": "I32", "BF16": "I16"}[header[name]["dtype"]])(header, name)


def transposed(header: Header, name: str) -> Header:
    return with_entry(shape=[*reversed(header[name]["shape"]), 1])(header, name)


HOSTILE: Mapping[str, Callable[[Header, str], Header | bytes]] = {
    "a header of 2^64 bytes": raw(-1),
    "a header of 2^62 bytes": raw(2**62),
    "a header beyond the file": raw(99_000_000),
    "an empty header": raw(0, b""),
    "a list": raw(2, b"[]"),
    "deep": raw(len(DEEP), DEEP.encode()),
    "a shape of 2^62": with_entry(shape=[2**62, 4]),
    "a shape of 30 digits": with_entry(shape=[10**30]),
    "a negative shape": with_entry(shape=[-1, 4]),
    "no shape": with_entry(shape=None),
    "offsets outside": with_entry(data_offsets=[0, 2**40]),
    "offsets backward": with_entry(data_offsets=[64, 0]),
    "offsets overlapping": lambda header, name: {**header, f"{name}.more": header[name]},
    "offsets of text": with_entry(data_offsets=["0", "8"]),
    "an unknown dtype": with_entry(dtype="F7"),
    "whole numbers": other_dtype,
    "other axes": transposed,
    "a name twice": twice,
    "one more, empty": with_tensor(),
    "one more, 2^62 empty rows": with_tensor(shape=[2**62, 0]),
    "one more, empty rows of 2^62": with_tensor(shape=[0, 2**62]),
    "one more, empty rows of 2^63": with_tensor(shape=[2**63, 0]),
    "one more of an eighth": with_tensor(dtype="F8_E4M3"),
    "places that are a list": with_pieces("[]"),
    "places that are no JSON": with_pieces("{"),
    "deep places": with_pieces(DEEP),
    "places before the first": with_pieces([-4, 0]),
    "places far away": with_pieces([2**70, 0]),
    "places in columns": with_pieces([0, 1]),
    "places that are no numbers": with_pieces(["0", None]),
    "places that are a number": with_pieces(7),
}
"""What may be in the header of a tensor file whose hash fits."""
