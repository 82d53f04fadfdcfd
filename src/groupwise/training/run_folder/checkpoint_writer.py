"""Write checkpoints beside training: the state is copied to host memory, and a thread writes the copy.

A crash cannot damage the last checkpoint: files are written aside and synced, the metadata last, then the folder gets
its name. The thread uses no collective: each rank leaves the hashes of its files in the folder, and the first one waits
for them. Errors of the thread are raised in the main thread, on all ranks, by the next `poll`, `start` or `wait`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from groupwise.core.errors import OutOfMemoryError, UserError, path_error_message
from groupwise.core.io.files import ignore_message, read_json, sync_folder, write_atomic, write_synced
from groupwise.core.io.tensor_files import write_tensors
from groupwise.dist.comm import Comm
from groupwise.dist.sharded_files import HostCopy, copy_part_to_host, copy_to_host, part_name
from groupwise.dist.sharding import is_sharded
from groupwise.training.run_folder.checkpoint import all_tensors, moments_placed_as, optimizer_tensors, policy_tensors
from groupwise.training.state import State
from groupwise.workloads.checkpoint_files import (
    EMA_WEIGHTS,
    METADATA_FILE,
    OPTIMIZER,
    WEIGHTS,
    checkpoint_errors,
    metadata_hash,
    newest_first,
    read_metadata,
    step_of,
)

_POLL_S = 0.02
_OTHERS_PARTS_S = 10.0
"""How long the first rank waits for the files of others when the run ends by an error that they may not have."""


class _Stopped(Exception):  # noqa: N818 - nothing failed
    """The thread was told to stop."""


@dataclass
class _Job:
    """What one rank writes of one checkpoint."""

    final: Path
    temporary: Path
    copies: dict[str, HostCopy]
    """Files of tensors by name; removed as they are written, which frees their memory."""
    files: Mapping[str, bytes]
    """The workload's own, which the first rank writes."""
    metadata: dict[str, Any]
    writers: int
    """Ranks that write a part."""


class CheckpointWriter:
    """At most one checkpoint is being written; the next one waits for it. All ranks call `start`, `poll` and `wait`."""

    def __init__(
        self,
        folder: Path,
        comm: Comm,
        *,
        keep: int,
        sync_logs: Callable[[], None] = lambda: None,
        warn: Callable[[str], None] = ignore_message,
    ):
        """Keeps the newest `keep` checkpoints. `sync_logs` is called before one gets its name."""
        self._folder, self._comm, self._keep, self._sync_logs, self._warn = folder, comm, keep, sync_logs, warn
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._pending = False
        """Whether a rank may still be writing: the same on all ranks."""
        self._stop = threading.Event()
        self._deadline = float("inf")
        self.failed = False
        """Whether a checkpoint could not be written."""

    def start(
        self, state: State, *, config: Mapping[str, Any], ranks: int, files: Mapping[str, bytes] | None = None
    ) -> Path:
        """Begin to save the state, and the workload's own files, as `step-NNNNNN`. Returns when the state is copied."""
        self.wait()
        final = self._folder / f"step-{state.step:06d}"
        temporary = self._folder / f".writing-{final.name}"
        is_new = False
        with self._fail_together():
            if self._comm.is_main:
                is_new = _make_room(self._folder, final, temporary)
                if not is_new:
                    _update_row_limits(final, state)
        if not self._comm.broadcast_object(is_new):
            return final
        copies, writers, copied = self._copies(state)
        job = _Job(final, temporary, copies, dict(files or {}), _metadata(state, config, ranks), writers)
        self._start_thread(job)
        if not copied:
            self.wait()  # nothing may change meanwhile
        return final

    def _start_thread(self, job: _Job) -> None:
        """On all ranks that write, or on none: a thread needs memory, too."""
        self._thread = None
        try:
            with self._fail_together():
                if self._comm.rank < job.writers:
                    thread = threading.Thread(target=self._run, args=(job,), name="checkpoint writer", daemon=True)
                    thread.start()
                    self._thread = thread
        except UserError:
            self.stop()
            raise
        self._pending = True

    def _copies(self, state: State) -> tuple[dict[str, HostCopy], int, bool]:
        """What this rank writes, how many ranks write, and whether it is a copy: without memory for one it is the state
        itself, on all ranks."""
        try:
            with self._comm.fail_together("Copying the state for a checkpoint"):
                return *_copies(state, self._comm, copy=True), True
        except OutOfMemoryError as error:
            message = str(error)
        if self._comm.is_main:
            self._warn(f"{message} The checkpoint is written without a copy, and training waits for it.")
        return *_copies(state, self._comm, copy=False), False

    def poll(self) -> bool:
        """Whether nothing is being written; raises the error of a rank that failed to."""
        if not self._pending:
            return True
        writing = self._thread is not None and self._thread.is_alive()
        failed, pending = self._comm.max(float(self._error is not None), float(writing))
        if failed:
            self.stop()
            with self._fail_together():
                if self._error is not None:
                    raise self._error
        self._pending = bool(pending)
        return not pending

    def wait(self) -> None:
        """Until what was begun is written, on all ranks."""
        while not self.poll():
            if self._comm.ranks == 1 and self._thread is not None:
                self._thread.join()
            time.sleep(_POLL_S if self._comm.ranks > 1 else 0)

    def stop(self) -> None:
        """Leave what is being written unfinished. It does not count as a checkpoint."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._pending = False

    def end_alone(self) -> None:
        """Let this rank finish what it writes, when others may not be there to agree. Errors are kept in `failed`."""
        self._deadline = time.monotonic() + _OTHERS_PARTS_S
        if self._thread is not None:
            self._thread.join()
        self.failed |= self._error is not None
        self._pending = False

    @contextmanager
    def _fail_together(self) -> Iterator[None]:
        """Errors of paths and disks as one sentence, on all ranks."""
        try:
            with self._comm.fail_together("Writing a checkpoint"):
                try:
                    yield
                except OSError as error:
                    message = path_error_message(error)
                    raise UserError(message) if message else error from error
        except Exception:
            self.failed = True
            raise

    def _run(self, job: _Job) -> None:
        """In the thread."""
        try:
            self._write(job)
        except _Stopped:
            return
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            self._error = error

    def _write(self, job: _Job) -> None:
        hashes: dict[str, str] = {}
        for name in list(job.copies):
            copied = job.copies.pop(name)
            path = job.temporary / name
            hashes[name] = write_tensors(path, copied.tensors, offsets=copied.offsets, proceed=self._refuse_stopped)
        if not self._comm.is_main:
            write_atomic(_hashes_file(job, self._comm.rank), _to_bytes(hashes))
            return
        for rank in range(1, job.writers):
            hashes |= self._hashes_of(job, rank)
        self._sync_logs()
        self._refuse_stopped()
        _finish(job, hashes, keep=self._keep)

    def _hashes_of(self, job: _Job, rank: int) -> dict[str, str]:
        """What another rank has written, once it has."""
        path = _hashes_file(job, rank)
        while not path.exists():
            self._refuse_stopped()
            time.sleep(_POLL_S)
            if time.monotonic() > self._deadline:
                raise _Stopped
        hashes = read_json(path)
        path.unlink()
        return hashes

    def _refuse_stopped(self) -> None:
        if self._stop.is_set():
            raise _Stopped


def write_checkpoint(
    folder: Path,
    state: State,
    *,
    config: Mapping[str, Any],
    ranks: int,
    keep: int,
    files: Mapping[str, bytes] | None = None,
    comm: Comm | None = None,
) -> Path:
    """Save the state and wait until it is written. The first rank alone calls it without `comm`, else all ranks do."""
    writer = CheckpointWriter(folder, comm or Comm(0, 1, torch.device("cpu")), keep=keep)
    path = writer.start(state, config=config, ranks=ranks, files=files)
    writer.wait()
    return path


def _copies(state: State, comm: Comm, *, copy: bool) -> tuple[dict[str, HostCopy], int]:
    """What this rank writes, by file, and how many ranks write something: each its part, or the first one all."""
    if is_sharded(state.policy):
        part = copy_part_to_host(all_tensors(state), moments_placed_as(state), is_main=comm.is_main, copy=copy)
        return ({part_name(comm.rank): part} if part.tensors else {}), comm.ranks
    if not comm.is_main:
        return {}, 1
    tensors = {WEIGHTS: policy_tensors(state), OPTIMIZER: optimizer_tensors(state)}
    tensors |= {EMA_WEIGHTS: state.ema.weights} if state.ema else {}
    return {name: copy_to_host(each, copy=copy) for name, each in tensors.items()}, 1


def _hashes_file(job: _Job, rank: int) -> Path:
    return job.temporary / f"hashes-{rank:05d}"


def _make_room(folder: Path, final: Path, temporary: Path) -> bool:
    """Whether there is no such checkpoint yet; then makes its folder, and removes what interrupted writes have left."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(final):
        if next(checkpoint_errors(final), None) is None:
            return False
        _remove(final)
    for leftover in (*folder.glob(".writing-step-*"), *folder.glob(".removing-step-*")):
        _delete(leftover)
    temporary.mkdir()
    return True


def _finish(job: _Job, hashes: Mapping[str, str], *, keep: int) -> None:
    """The last files of a checkpoint, the metadata, its final name; and then no more than `keep` of them."""
    own = {name: hashlib.sha256(content).hexdigest() for name, content in job.files.items()}
    metadata = {**job.metadata, "sha256": {**own, **hashes}}
    metadata["sha256"][METADATA_FILE] = metadata_hash(metadata)
    for name, content in {**job.files, METADATA_FILE: _to_bytes(metadata)}.items():
        write_synced(job.temporary / name, content)
    sync_folder(job.temporary)
    job.temporary.rename(job.final)
    folder = job.final.parent
    sync_folder(folder)
    for old in [path for path in newest_first(folder) if step_of(path) <= step_of(job.final)][keep:]:
        _remove(old)


def _metadata(state: State, config: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    return {
        "step": state.step,
        "updates": state.updates,
        "ranks": ranks,
        "row_limits": dict(state.row_limits),
        "config": config,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("groupwise", "torch", "accelerate")},
        },
    }


def _update_row_limits(path: Path, state: State) -> None:
    """Give a checkpoint that was already written the limits that were halved since."""
    metadata = read_metadata(path)
    if metadata.get("row_limits") != state.row_limits:
        metadata["row_limits"] = dict(state.row_limits)
        metadata["sha256"][METADATA_FILE] = metadata_hash(metadata)
        write_atomic(path / METADATA_FILE, _to_bytes(metadata))


def _remove(path: Path) -> None:
    """Rename first, so that a crash never leaves half a checkpoint under a valid name."""
    trash = path.with_name(f".removing-{path.name}")
    _delete(trash)
    path.rename(trash)
    _delete(trash)


def _delete(path: Path) -> None:
    """A folder with all that is in it, a file, or a link but not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _to_bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode()
