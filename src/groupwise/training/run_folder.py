"""The folder of a run: who may write there, what is in it, and how it is rewound on resume."""

from __future__ import annotations

import fcntl
import json
import math
import os
import traceback
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
            self.release()
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
            kept = [entry for entry in read_jsonl(self.path / name) if entry["step"] < step]
            _replace(self.path / name, "".join(json.dumps(entry) + "\n" for entry in kept))

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """A JSON file, whole or not at all."""
        _replace(self.path / name, json.dumps(_finite(content), indent=1, default=_plain) + "\n")

    def append(self, name: str, entries: Sequence[Mapping[str, Any]]) -> None:
        with (self.path / name).open("a") as file:
            file.writelines(json.dumps(_finite(entry), default=_plain) + "\n" for entry in entries)

    def read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        except ValueError as error:
            raise UserError(
                f"{path} is damaged ({error}). Restore it, or delete it: eval.json is written anew by the next"
                " evaluation, config.json by the next --resume."
            ) from error
        return content

    def explain(self, error: Exception) -> None:
        """Leave the whole traceback of what stopped the run where a developer finds it."""
        (self.path / "error.txt").write_text("".join(traceback.format_exception(error)))

    def metrics(self) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "metrics.jsonl")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a last line that a crash cut short is passed over."""
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


def _finite(value: Any) -> Any:
    """JSON has no NaN: a figure that does not exist is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return {name: _finite(entry) for name, entry in value.items()} if isinstance(value, Mapping) else value


def _plain(value: Any) -> Any:
    """What JSON cannot write itself: tensors as lists, the rest as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.new")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
