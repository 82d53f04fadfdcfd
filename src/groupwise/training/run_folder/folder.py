"""The folder of a run: its lock and owner, its JSON files and logs, and how the logs are rewound on resume."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from groupwise.core.errors import UserError
from groupwise.core.io.files import (
    append_jsonl,
    ignore_message,
    read_json,
    read_jsonl,
    read_log,
    sync_file,
    sync_folder,
    to_json,
    write_atomic,
)
from groupwise.core.io.json_types import is_number
from groupwise.dist.launcher import launcher_identity, rendezvous_id, was_restarted
from groupwise.training.run_folder.abrupt_end import oom_kills
from groupwise.workloads.checkpoint_files import newest_first, refuse_other_than_folder

METRICS, SAMPLES, OLDER_SAMPLES = "metrics.jsonl", "samples.jsonl", "samples.1.jsonl"
START = "start"
NONFINITE = "nonfinite.jsonl"
"""The rollouts of groups in which a number was not finite."""
_LOGS = (METRICS, SAMPLES, OLDER_SAMPLES)
_OWNER = ".owner.json"
_WAIT_FOR_FIRST_RANK_S = 3.0
"""The lock of a process that was killed is free at once, that of one which is stopped or saves itself is not."""
_WAIT_FOR_PREDECESSOR_S = 30.0
"""A launcher may restart ranks before the last of their predecessors is gone."""


@dataclass(frozen=True)
class Owner:
    """Who trains in a folder: a process, and the launcher that started it, if one did."""

    process: int
    host: str
    launcher: str
    job_id: str
    oom_kills: int
    """Of the kernel before the run started."""
    ended: bool = False
    """Whether it has left the folder in order, be it after an error."""

    @staticmethod
    def current() -> Owner:
        return Owner(os.getpid(), socket.gethostname(), launcher_identity(), rendezvous_id(), oom_kills())


def reward_of(entry: Mapping[str, Any]) -> float | None:
    """Of a line of metrics.jsonl; None where the step has none."""
    reward = entry.get("reward")
    return float(reward) if is_number(reward) else None


class RunFolder:
    """`config.json`, `metrics.jsonl`, `samples.jsonl`, `eval.json` and `checkpoints/`. Written by rank 0 alone."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock = FileLock(path / ".lock", blocking=False)
        self._own: Owner | None = None
        self.predecessor: dict[str, Any] = {}
        """Who held the folder before this process."""

    def lock(self, *, resume: bool) -> None:
        """Reserve the folder for this process. Refuse one that holds another run, is in use, or cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=_WAIT_FOR_PREDECESSOR_S if was_restarted() else 0, blocking=was_restarted())
        except Timeout as error:
            if not os.path.lexists(self._lock.lock_file):  # such as in /proc, where nobody can make one
                raise UserError(
                    f"The run folder {self.path} cannot be written. Choose another with --run-dir."
                ) from error
            raise UserError(
                f"Another process is training in {self.path} now{self._owner_label()}. Wait for it, or choose another"
                " --run-dir."
            ) from error
        except OSError as error:
            raise UserError(
                f"The run folder {self.path} cannot be written ({error.strerror}). Choose another with --run-dir."
            ) from error
        try:
            self.refuse_other_run(resume=resume)
            self.predecessor, owner = self._owner(), Owner.current()
            self.write(_OWNER, asdict(owner))
        except (UserError, OSError):
            self.release()
            raise
        self._own = owner

    def refuse_other_run(self, *, resume: bool) -> None:
        """Refuse a folder that holds a run, unless it is to be continued. Nothing is written."""
        if not resume and (self.has_run or newest_first(self.checkpoints)):
            raise UserError(
                f"The run folder {self.path} already holds a run ({len(self.metrics())} steps). Continue it with"
                " --resume, or choose another with --run-dir."
            )

    def release(self) -> None:
        if self._own is not None:
            with suppress(OSError):  # a full disk must not hide what ended the run
                self.write(_OWNER, asdict(replace(self._own, ended=True)))
            self._own = None
        self._lock.release()

    @contextmanager
    def taken_over(self) -> Iterator[bool]:
        """Within, this process holds the folder in place of the one that did, if that one is gone. Its name stays in
        the folder: the next run says how it has ended."""
        try:
            self._lock.acquire(timeout=_WAIT_FOR_FIRST_RANK_S, blocking=True)
        except (Timeout, OSError):
            yield False
            return
        try:
            yield True
        finally:
            self._lock.release()

    def is_of_this_job(self) -> bool:
        """Whether an earlier attempt of this job has started the folder's run, so that this one continues it."""
        then, now = self._owner(), Owner.current()
        same_id = was_restarted() and now.job_id != "" and then.get("job_id") == now.job_id
        return same_id or (now.launcher != "" and then.get("launcher") == now.launcher)

    def _owner(self) -> dict[str, Any]:
        """For information: a damaged file says as little as a missing one."""
        try:
            return self.read(_OWNER)
        except UserError:
            return {}

    def _owner_label(self) -> str:
        owner = self._owner()
        return f" (process {owner.get('process')} on {owner.get('host')})" if owner else ""

    def rewind(self, step: int, warn: Callable[[str], None] = ignore_message) -> None:
        """Remove the log entries of steps that will be trained again, and repair what a crash or others have left."""
        for name in _LOGS:
            if name != OLDER_SAMPLES or os.path.lexists(self.path / name):
                kept = (line for line, entry in read_log(self.path / name, warn) if entry["step"] < step)
                write_atomic(self.path / name, b"".join(kept))
        if (self.path / OLDER_SAMPLES).exists() and not (self.path / SAMPLES).stat().st_size:
            (self.path / OLDER_SAMPLES).replace(self.path / SAMPLES)  # as it was before the file was rotated
        logged = {entry["step"] for _, entry in read_log(self.path / METRICS)}
        if len(logged) < step:
            warn(f"{METRICS} lacks {step - len(logged)} of the {step} steps that were trained; the weights have them.")

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace a JSON file atomically."""
        with self._still_there():
            write_atomic(self.path / name, (to_json(content, indent=1) + "\n").encode())

    def write_start(self, files: Mapping[str, bytes]) -> None:
        """Keep what the workload measured when it was built, for a run that ends before its first checkpoint."""
        start = self.start_files() or self.path / START
        if files:
            start.mkdir(exist_ok=True)
        for name, content in files.items():
            write_atomic(start / name, content)

    def start_files(self) -> Path | None:
        """The folder that `write_start` has written, if it has."""
        start = self.path / START
        refuse_other_than_folder(start)
        return start if start.is_dir() else None

    def append(self, name: str, entries: Sequence[Mapping[str, Any]]) -> None:
        with self._still_there():
            append_jsonl(self.path / name, entries)

    @contextmanager
    def _still_there(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if self.path.is_dir():
                raise
            raise UserError(
                f"The run folder {self.path} has been moved or deleted while the run was writing to it. If it was"
                " moved, continue with --resume and its new place as --run-dir: the checkpoints are complete."
            ) from error

    def append_samples(self, entries: Sequence[Mapping[str, Any]], *, max_bytes: int) -> None:
        """Rotates: beyond `max_bytes` the file becomes samples.1.jsonl, in place of the one before."""
        self.append(SAMPLES, entries)
        if (self.path / SAMPLES).stat().st_size > max_bytes:
            (self.path / SAMPLES).replace(self.path / OLDER_SAMPLES)

    def append_nonfinite(self, entries: Sequence[Mapping[str, Any]], *, max_bytes: int) -> None:
        """To nonfinite.jsonl, until it is full. A step that is trained again after a resume may be in it twice."""
        path = self.path / NONFINITE
        if entries and not (path.exists() and path.stat().st_size > max_bytes):
            self.append(NONFINITE, entries)

    def sync_logs(self) -> None:
        """Wait until the disk has the logs: after a power cut no checkpoint is ahead of them."""
        for name in _LOGS:
            sync_file(self.path / name)
        sync_folder(self.path)

    def read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        if not os.path.lexists(path):
            return {}
        try:
            return read_json(path)
        except UserError as error:
            raise UserError(
                f"{error} Or delete it: eval.json is written again by the next evaluation, config.json by the next"
                " --resume."
            ) from error

    def write_traceback(self, error: BaseException) -> None:
        """Keep the whole traceback of what stopped the run, for developers."""
        write_atomic(self.path / "error.txt", "".join(traceback.format_exception(error)).encode("utf-8", "replace"))

    @property
    def has_run(self) -> bool:
        return next(iter(read_log(self.path / METRICS)), None) is not None

    def metrics(self, warn: Callable[[str], None] = ignore_message) -> list[dict[str, Any]]:
        return read_jsonl(self.path / METRICS, warn)

    def samples(self, warn: Callable[[str], None] = ignore_message) -> list[dict[str, Any]]:
        """Of the newest file that has any."""
        return read_jsonl(self.path / SAMPLES, warn) or read_jsonl(self.path / OLDER_SAMPLES, warn)
