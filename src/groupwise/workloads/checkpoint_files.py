"""Find, verify and read a checkpoint folder. Used by training, export and serving."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError

METADATA_FILE = "checkpoint.json"
WEIGHTS, EMA_WEIGHTS = "policy.safetensors", "ema.safetensors"


def newest_valid_checkpoint(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint without errors; warns of every damaged one that is newer."""
    for path in newest_first(folder):
        error = next(checkpoint_errors(path), None)
        if error is None:
            return path
        warn(f"Checkpoint {path} is damaged ({error}); trying the one before it.")
    if any(folder.glob("step-*")):
        raise UserError(
            f"Every checkpoint in {folder} is damaged, so there is nothing to resume from. Restore one from a backup,"
            " or start a new run with another --run-dir."
        )
    return None


def read_metadata(path: Path) -> dict[str, Any]:
    metadata: dict[str, Any] = json.loads((path / METADATA_FILE).read_text())
    return metadata


def newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def metadata_hash(metadata: Mapping[str, Any]) -> str:
    """Hash of all metadata but the hash itself."""
    hashes = {name: value for name, value in metadata["sha256"].items() if name != METADATA_FILE}
    rest = {**metadata, "sha256": hashes}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def checkpoint_errors(path: Path) -> Iterator[str]:
    """Why a checkpoint cannot be used, if it cannot."""
    try:
        metadata = read_metadata(path)
        hashes = dict(metadata["sha256"])
        if hashes.pop(METADATA_FILE) != metadata_hash(metadata) or metadata["step"] != step_of(path):
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
