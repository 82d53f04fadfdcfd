"""Hashes of files' bytes, kept by path, size and time of change: large files are read once for all runs."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from filelock import FileLock

from groupwise.core.groups import content_hash
from groupwise.core.io.files import cache_folder, open_regular, parse_json

_BLOCK = 1 << 22
_LOCKED_BYTES = 64 << 20
"""From this size on one process reads a file, and others wait for its hash."""
_SETTLED_S = 2.0
"""A file that changed less than this ago may change again without another time of change: its hash is not kept."""


def file_hash(path: Path) -> str:
    """A hash of the file's bytes."""
    status = path.stat()
    stamp = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    note = cache_folder() / "file-hashes" / f"{content_hash(str(path.resolve()))}.json"
    if kept := _kept(note, stamp):
        return kept
    note.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{note}.lock") if status.st_size >= _LOCKED_BYTES else nullcontext():
        if kept := _kept(note, stamp):
            return kept
        digest = hashlib.blake2b(digest_size=16)
        with open_regular(path, follow_links=True) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        if time.time() - status.st_mtime > _SETTLED_S:
            replace_file(note, json.dumps({**stamp, "hash": digest.hexdigest()}).encode())
    return digest.hexdigest()


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file of a cache that several processes write; what was there or the new content is seen, nothing else.

    The disk is not waited for: after a power cut the file may be damaged, and a reader of a cache must notice that.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def _kept(note: Path, stamp: dict[str, int]) -> str | None:
    try:
        content: Any = parse_json(note.read_bytes())
    except (OSError, ValueError):
        return None
    known = isinstance(content, dict) and {name: content.get(name) for name in stamp} == stamp
    return content["hash"] if known and isinstance(content.get("hash"), str) else None
