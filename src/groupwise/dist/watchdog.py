"""Notices that a thread is stuck in a call that does not return, such as foreign code, a DataLoader or a device.

For the whole time limit no piece of work was done, and the thread ran no Python at all, or it only waited: with hardly
any CPU time, and always at the same place. Code that is slow does one or the other.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TextIO

from groupwise.core.io.progress import pieces_done

_DEBUGGERS = ("bdb", "pdb", "pydevd", "debugpy")
_LONGEST_PAUSE_S = 5.0
"""More than this between two looks is a process that was stopped, and does not count."""
_SEEN_ELSEWHERE = 2
"""Looks in a row at another place that count as progress: a loop that polls is elsewhere for a moment, too."""
_BUSY_SHARE = 0.1

Place = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Look:
    """What is seen of a thread at one moment. Counts and times are since some start."""

    seconds: float
    cpu_seconds: float
    pieces: int
    """Of work."""
    has_run: bool
    """Whether it has run any Python since the last look."""
    place: Place
    """Where in which functions."""
    in_debugger: bool = False


class StuckDetector:
    """Whether a thread makes no progress for `limit_s`. Someone has to look about once a second."""

    def __init__(self, limit_s: float, look: Callable[[], Look]):
        self.limit_s, self._look = limit_s, look
        self._last = self._start = look()
        self._still_s, self._elsewhere = 0.0, 0

    def is_stuck(self) -> bool:
        """By now."""
        now, last = self._look(), self._last
        seconds = now.seconds - last.seconds
        self._last, self._still_s = now, self._still_s + min(seconds, _LONGEST_PAUSE_S)
        self._elsewhere = 0 if now.place == self._start.place else self._elsewhere + 1
        is_busy = now.cpu_seconds - last.cpu_seconds > _BUSY_SHARE * seconds
        gets_on = now.has_run and (is_busy or self._elsewhere >= _SEEN_ELSEWHERE)
        if gets_on or now.pieces != self._start.pieces or now.in_debugger:
            self._start, self._still_s, self._elsewhere = now, 0.0, 0
        return self._still_s >= self.limit_s


class ThreadWatcher:
    """Looks at the thread that has made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread) if hasattr(time, "pthread_getcpuclockid") else None
        # Python calls what is pending in the main thread alone
        self._sees_python = threading.current_thread() is threading.main_thread()
        self._answers, self._questions = 0, 0
        self._answer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._count_answer)

    def look(self) -> Look:
        frame = _current_frame(self._thread)
        return Look(
            seconds=time.monotonic(),
            cpu_seconds=time.clock_gettime(self._clock) if self._clock is not None else 0.0,
            pieces=pieces_done(),
            has_run=self._has_run(),
            place=tuple((id(each.f_code), each.f_lasti) for each in _frames(frame)),
            in_debugger=any(each.f_globals.get("__name__", "").startswith(_DEBUGGERS) for each in _frames(frame)),
        )

    def where(self) -> str:
        """The innermost line of Python in the thread."""
        frame = _current_frame(self._thread)
        return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else "its last line"

    def _has_run(self) -> bool:
        """A call is left pending; the main thread makes it as soon as it runs any Python."""
        if not self._sees_python:
            return True
        has_run = self._answers == self._questions
        if has_run:
            self._questions += 1
            ctypes.pythonapi.Py_AddPendingCall(self._answer, None)
        return has_run

    def _count_answer(self, _argument: object) -> int:
        self._answers += 1
        return 0


def _current_frame(thread: int) -> FrameType | None:
    """Without a garbage collection meanwhile: up to Python 3.11 it may wait for a lock that `_current_frames` holds."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if is_collecting:
            gc.enable()


def _frames(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def dump_stacks() -> None:
    """The Python stacks of all threads, to stderr."""
    stream = _stderr()
    if stream is not None:
        stream.flush()
        faulthandler.dump_traceback(stream, all_threads=True)


def dump_stacks_if_no_thread_runs(limit_s: float) -> None:
    """Once, where no thread of Python runs for so long, because one keeps the interpreter's lock.

    To be called again and again. Then only C code can act, and it cannot tell such a process from one that was stopped
    meanwhile, so it ends nothing.
    """
    stream = _stderr()
    if stream is not None:
        faulthandler.dump_traceback_later(limit_s, file=stream)


def _stderr() -> TextIO | None:
    """None where it is no file of the system, as in a notebook."""
    for stream in (sys.stderr, sys.__stderr__):
        try:
            if stream is not None and stream.fileno() >= 0:
                return stream
        except (io.UnsupportedOperation, ValueError, OSError):
            continue
    return None
