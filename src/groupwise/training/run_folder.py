"""The folder of a run: its lock, its JSON files and logs, and how the logs are rewound on resume."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from groupwise.core.errors import UserError
from groupwise.core.files import append_jsonl, read_jsonl, to_json, write_atomic


class RunFolder:
    """`config.json`, `metrics.jsonl`, `samples.jsonl`, `eval.json` and `checkpoints/`. Written by rank 0 alone."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock = FileLock(path / ".lock", blocking=False)

    def lock(self, *, resume: bool) -> None:
        """Reserve the folder for this process. Refuse one that holds another run, is in use, or cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout as error:
            raise UserError(
                f"Another process is training in {self.path} now. Wait for it, or choose another --run-dir."
            ) from error
        except OSError as error:
            raise UserError(
                f"The run folder {self.path} cannot be written ({error.strerror}). Choose another with --run-dir."
            ) from error
        try:
            self.refuse_other_run(resume=resume)
        except UserError:
            self.release()
            raise

    def refuse_other_run(self, *, resume: bool) -> None:
        """Refuse a folder that holds a run, unless it is to be continued. Nothing is written."""
        steps = len(self.metrics())
        if not resume and (steps or any(self.checkpoints.glob("step-*"))):
            raise UserError(
                f"The run folder {self.path} already holds a run ({steps} steps). Continue it with --resume, or choose"
                " another with --run-dir."
            )

    def release(self) -> None:
        self._lock.release()

    def rewind(self, step: int) -> None:
        """Remove the log entries of steps that will be trained again."""
        for name in ("metrics.jsonl", "samples.jsonl"):
            kept = [entry for entry in read_jsonl(self.path / name) if entry["step"] < step]
            write_atomic(self.path / name, "".join(to_json(entry) + "\n" for entry in kept).encode())

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace a JSON file atomically."""
        write_atomic(self.path / name, (to_json(content, indent=1) + "\n").encode())

    def append(self, name: str, entries: Sequence[Mapping[str, Any]]) -> None:
        append_jsonl(self.path / name, entries)

    def read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        except ValueError as error:
            raise UserError(
                f"{path} is damaged ({error}). Restore it, or delete it: eval.json is written again by the next"
                " evaluation, config.json by the next --resume."
            ) from error
        return content

    def write_traceback(self, error: BaseException) -> None:
        """Keep the whole traceback of what stopped the run, for developers."""
        (self.path / "error.txt").write_text("".join(traceback.format_exception(error)))

    def metrics(self) -> list[dict[str, Any]]:
        return read_jsonl(self.path / "metrics.jsonl")
