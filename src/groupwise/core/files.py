"""Files that survive a crash: atomic writes, JSON without NaN, and JSONL whose last line may be cut short."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_CACHE_VARIABLE = "GROUPWISE_CACHE"


def cache_folder() -> Path:
    """The folder of things that can be computed again: $GROUPWISE_CACHE, or ~/.cache/groupwise."""
    return Path(os.environ.get(_CACHE_VARIABLE) or Path.home() / ".cache" / "groupwise")


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file: after a crash it holds the old content or the new, never a part of it."""
    temporary = path.with_name(f".{path.name}.new")
    write_synced(temporary, content)
    temporary.replace(path)
    sync_folder(path.parent)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's entries: a rename is durable only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(content: Any, *, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinity become null, tensors and arrays lists, anything else text."""
    return json.dumps(_without_nan(content), indent=indent, default=_json_value, allow_nan=False)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a log that this process or an earlier one appended to. A last line cut short by a crash is
    ignored; a file that does not exist has none."""
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


def append_jsonl(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(to_json(entry) + "\n" for entry in entries)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return {name: _without_nan(entry) for name, entry in value.items()} if isinstance(value, Mapping) else value


def _json_value(value: Any) -> Any:
    return _without_nan(value.tolist()) if hasattr(value, "tolist") else str(value)
