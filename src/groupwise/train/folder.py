"""The folder of a run: who may write there, what is in it, and how it is rewound on resume."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from groupwise.core.errors import UserError


class RunFolder:
    """`config.json`, `metrics.jsonl`, `samples.jsonl`, `eval.json` and `checkpoints/`. Used by rank 0 alone."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: TextIO | None = None

    def claim(self, *, resume: bool) -> None:
        """Make the folder this process's own; refuse one that holds another run or that cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("a")
        except OSError as error:
            raise UserError(
                f"The run folder {self.path} cannot be written ({error.strerror}). Choose another with --run-dir."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"Another process is training in {self.path} now. Wait for it, or choose another --run-dir."
            ) from error
        steps = len(self.metrics())
        if not resume and (steps or any(self.checkpoints.glob("step-*"))):
            raise UserError(
                f"The run folder {self.path} already holds a run ({steps} steps). Continue it with --resume, or choose"
                " another with --run-dir."
            )

    def release(self) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    def rewind(self, step: int) -> None:
        """Forget what was logged of steps that will be trained again."""
        for name in ("metrics.jsonl", "samples.jsonl"):
            kept = [entry for entry in read_lines(self.path / name) if entry["step"] < step]
            _replace(self.path / name, "".join(json.dumps(entry) + "\n" for entry in kept))

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """A JSON file, whole or not at all."""
        _replace(self.path / name, json.dumps(content, indent=1) + "\n")

    def append(self, name: str, entries: Sequence[Mapping[str, Any]]) -> None:
        with (self.path / name).open("a") as file:
            file.writelines(json.dumps(_finite(entry)) + "\n" for entry in entries)

    def read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return content

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "metrics.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a last line that a crash cut short is passed over."""
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


def _finite(value: Any) -> Any:
    """JSON has no NaN: a figure that does not exist is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return {name: _finite(entry) for name, entry in value.items()} if isinstance(value, Mapping) else value


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.new")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
