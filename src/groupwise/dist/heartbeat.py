"""Which ranks are alive and what they do: each says so every second, and who loses a rank looks it up."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from groupwise.core.errors import UserError

BEAT_S = 1.0
_SILENT_S = 3.0
"""A rank that says nothing for so long is not running."""
_STORE_TIMEOUT = timedelta(seconds=5)
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
    """What this rank does, for others to see. It starts when several ranks connect."""

    rank: int
    ranks: int
    timeout_s: float
    activity: str = "the start"
    _store: Any = field(default=None, repr=False)
    _ended: bool = False
    _changed: threading.Event = field(default_factory=threading.Event, repr=False)

    def start(self) -> None:
        self._store = _connect_store()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._ended = True
        self._changed.set()

    def begin(self, activity: str) -> None:
        """Say what this rank does from now on."""
        self.activity = activity
        self._changed.set()

    @contextmanager
    def explain_lost_rank(self) -> Iterator[None]:
        """The error of a collective that another rank has left becomes a paragraph which names that rank."""
        try:
            yield
        except RuntimeError as error:
            if self.ranks == 1 or not is_lost_rank(error):
                raise
            raise LostRankError(self._explanation(error)) from error
        finally:
            self.stop()

    def _beat(self) -> None:
        beats = 0
        while not self._ended:
            self._changed.clear()
            try:
                self._store.set(_key(self.rank), json.dumps([beats, self.activity]))
            except RuntimeError:  # the store is gone, and with it who would read this
                return
            beats += 1
            self._changed.wait(BEAT_S)

    def _explanation(self, error: RuntimeError) -> str:
        timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        reason = f"did not answer within {self.timeout_s:g} s (--rank-timeout-s)" if timed_out else "is gone"
        return (
            f"{self._who()} {reason}; this rank was at {self.activity}. Look above for its own message: without one it"
            " was killed (exit code -9: by a person, or by the system because memory ran out), stopped, or its machine"
            " is lost. Rank 0 saves the complete steps if it can; --resume continues from the newest checkpoint, on any"
            " number of ranks, and `torchrun --max-restarts N` does so by itself."
        )

    def _who(self) -> str:
        """The ranks that are silent; those that are elsewhere where none is."""
        first = self._read_beats()
        time.sleep(_SILENT_S)
        second = self._read_beats()
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        silent = [rank for rank in others if first.get(rank) is None or first.get(rank) == second.get(rank)]
        elsewhere = [rank for rank in others if second.get(rank, [0, ""])[1] != self.activity]
        lost = silent or elsewhere or others
        names = [f"rank {rank} (last seen at {second.get(rank, [0, 'the start'])[1]})" for rank in lost]
        return (", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")).capitalize()

    def _read_beats(self) -> Mapping[int, list[Any]]:
        beats: dict[int, list[Any]] = {}
        try:
            for rank in range(self.ranks):
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
