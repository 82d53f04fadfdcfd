"""Which ranks are alive and what they do. Each says so every second, and who loses a rank looks it up; a rank that is
stuck itself is ended, also where there is only one."""

from __future__ import annotations

import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from groupwise.core.errors import UserError
from groupwise.core.io.process_end import end_process
from groupwise.core.io.progress import advance
from groupwise.dist.watchdog import StuckDetector, ThreadWatcher, dump_stacks, dump_stacks_if_no_thread_runs

BEAT_S = 1.0
_SILENT_S = 3.0
"""A rank that says nothing for so long is not running."""
_STORE_TIMEOUT = timedelta(seconds=5)
_MARGIN_S = 10.0
"""A rank that waits for another is no stuck rank: its collective has the same time limit and ends first."""
_SAVE_S = 60.0
"""Time to save when a rank is stuck: the disk or the device may be what is stuck."""
_MESSAGES = (
    "gloo",
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "socket timeout",
    "application timeout",
    "read error",
    "write error",
    "nccl",
)
"""Parts of the messages with which torch's backends say that another rank does not answer."""


class LostRankError(UserError):
    """Another rank has died, or did not answer within the time limit."""

    exit_code = 3


@dataclass
class Heartbeat:
    """What this rank does, for others to see, and for this process to notice that it does nothing."""

    rank: int
    ranks: int
    timeout_s: float
    activity: str = "the start"
    save: Callable[[], str] | None = field(default=None, repr=False)
    """Saves the complete steps when this rank is stuck, from another thread; returns a sentence about it."""
    saved: str = ""
    """A sentence about what was saved after another rank was lost."""
    _store: Any = field(default=None, repr=False)
    _detector: StuckDetector | None = field(default=None, repr=False)
    _watcher: ThreadWatcher | None = field(default=None, repr=False)
    _thread: threading.Thread | None = field(default=None, repr=False)
    _ended: threading.Event | None = field(default=None, repr=False)
    _changed: threading.Event = field(default_factory=threading.Event, repr=False)
    _lost: list[int] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start to say what this rank does, if it has not been started."""
        if self._ended is None:
            self._store = _connect_store() if self.ranks > 1 else None
            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._beat, args=(self._ended,), name="heartbeat", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has withdrawn its timer: a process that is forked while it runs cannot set one."""
        if self._ended is not None:
            self._ended.set()
        self._ended = self._detector = None
        self._changed.set()
        if self._thread is not None:
            self._thread.join(_STORE_TIMEOUT.total_seconds())

    def begin(self, activity: str) -> None:
        """Say what this rank does from now on."""
        self.activity = activity
        advance()
        self._changed.set()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Within, this thread is ended with exit code 3 if it is stuck, and the error of a collective that another rank
        has left becomes a paragraph which names that rank."""
        limit_s = self.timeout_s + (_MARGIN_S if self.ranks > 1 else 0.0)
        self._watcher, self._lost, self.saved = ThreadWatcher(), None, ""
        self._detector = StuckDetector(limit_s, self._watcher.look)
        self.start()
        try:
            yield
        except RuntimeError as error:
            if self.ranks == 1 or not is_lost_rank(error):
                raise
            raise LostRankError(self._explanation(error)) from error
        finally:
            self.stop()

    def lost_ranks(self) -> list[int]:
        """After the error of a collective: the ranks that are silent; those that are elsewhere where none is."""
        if self._lost is None:
            first = self._read_beats()
            time.sleep(_SILENT_S)
            second = self._read_beats()
            others = [rank for rank in range(self.ranks) if rank != self.rank]
            silent = [rank for rank in others if first.get(rank) is None or first.get(rank) == second.get(rank)]
            elsewhere = [rank for rank in others if second.get(rank, [0, ""])[1] != self.activity]
            self._lost = silent or elsewhere or others
        return self._lost

    def _beat(self, ended: threading.Event) -> None:
        beats = 0
        while not ended.is_set():
            self._changed.clear()
            self._send(beats)
            beats += 1
            detector = self._detector
            if detector is not None:
                dump_stacks_if_no_thread_runs(detector.limit_s)
                if detector.is_stuck():
                    self._end_process(detector)
            self._changed.wait(BEAT_S)
        faulthandler.cancel_dump_traceback_later()

    def _send(self, beats: int) -> None:
        try:
            if self._store is not None:
                self._store.set(_key(self.rank), json.dumps([beats, self.activity]))
        except RuntimeError:  # the store is gone, and with it who would read this
            self._store = None

    def _end_process(self, detector: StuckDetector) -> None:
        dump_stacks()
        where = self._watcher.where() if self._watcher is not None else ""
        message = (
            f"rank {self.rank} makes no progress since {detector.limit_s:g} s (--rank-timeout-s) at {self.activity}:"
            f" {where} has not returned. The stacks of all threads are above. {self._save_in_time()} The process ends"
            f" with code {LostRankError.exit_code}; --resume continues. If this is only slow, give it a longer"
            " --rank-timeout-s."
        )
        end_process(message, code=LostRankError.exit_code)

    def _save_in_time(self) -> str:
        sentences = ["The complete steps could not be saved in time: the newest checkpoint is what is left."]
        save = self.save
        if save is None:
            return "Nothing was to be saved."
        thread = threading.Thread(target=lambda: sentences.append(save()), name="save", daemon=True)
        thread.start()
        thread.join(_SAVE_S)
        return sentences[-1]

    def _explanation(self, error: RuntimeError) -> str:
        timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        reason = f"did not answer within {self.timeout_s:g} s (--rank-timeout-s)" if timed_out else "is gone"
        return (
            f"{self._names()} {reason}; this rank was at {self.activity}. Look above for its own message: without one"
            " it was killed (exit code -9: by a person, or by the system because memory ran out), stopped, or its"
            f" machine is lost. {self.saved or 'Another rank saves the complete steps if it can.'} --resume continues"
            " from the newest checkpoint, on any number of ranks, and `torchrun --max-restarts N` does so by itself."
        )

    def _names(self) -> str:
        beats = self._read_beats()
        names = [f"rank {rank} (last seen at {beats.get(rank, [0, 'the start'])[1]})" for rank in self.lost_ranks()]
        return (", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")).capitalize()

    def _read_beats(self) -> Mapping[int, list[Any]]:
        beats: dict[int, list[Any]] = {}
        try:
            for rank in range(self.ranks if self._store is not None else 0):
                if self._store.check([_key(rank)]):
                    beats[rank] = json.loads(self._store.get(_key(rank)))
        except RuntimeError:  # the machine with the store is gone
            pass
        return beats


def is_lost_rank(error: BaseException) -> bool:
    """Whether an error of torch means that another rank does not answer."""
    kinds = tuple(getattr(dist, name) for name in ("DistNetworkError", "DistBackendError", "DistStoreError"))
    text = str(error).lower()
    return isinstance(error, kinds) or (type(error) is RuntimeError and any(part in text for part in _MESSAGES))


def _key(rank: int) -> str:
    return f"groupwise heartbeat {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {rank}"


def _connect_store() -> Any:
    """A connection of its own: a blocked collective must not block the heartbeat."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, None, is_master=False, timeout=_STORE_TIMEOUT)  # type: ignore[attr-defined]
