"""Checkpoints as files: found, checked, and read by the loop and by what uses a trained policy without one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError

METADATA_FILE = "checkpoint.json"
WEIGHTS, AVERAGED_WEIGHTS = "policy.safetensors", "ema.safetensors"


def newest_valid_checkpoint(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; every damaged one passed over is warned about."""
    for path in newest_first(folder):
        found = next(checkpoint_errors(path), None)
        if found is None:
            return path
        warn(f"Checkpoint {path} is damaged ({found}); trying the one before it.")
    if any(folder.glob("step-*")):
        raise UserError(
            f"Every checkpoint in {folder} is damaged, so there is nothing to resume from. Restore one from a backup,"
            " or start anew with another --run-dir."
        )
    return None


def read_meta(path: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((path / METADATA_FILE).read_text())
    return meta


def newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def metadata_hash(meta: Mapping[str, Any]) -> str:
    """Of everything in the description but this hash itself."""
    rest = {**meta, "sha256": {name: value for name, value in meta["sha256"].items() if name != METADATA_FILE}}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def checkpoint_errors(path: Path) -> Iterator[str]:
    """What is wrong with a checkpoint, if anything."""
    try:
        meta = read_meta(path)
        hashes = dict(meta["sha256"])
        if hashes.pop(METADATA_FILE) != metadata_hash(meta) or meta["step"] != step_of(path):
            yield f"{METADATA_FILE} is not what was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"{METADATA_FILE} cannot be read: {error}"
        return
    for name, expected in hashes.items():
        part = path / name
        if not part.is_file():
            yield f"{name} is missing"
        elif hashlib.sha256(part.read_bytes()).hexdigest() != expected:
            yield f"{name} is not what was written"
