"""Interrupts a function after so many seconds, also one that swallows exceptions or never returns to Python."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from groupwise.core.io.user_code import without_exit


def with_time_limit(function: Callable[..., Any], timeout_s: float, message: str = "") -> Callable[..., Any]:
    """The function, raising TimeoutError(message) when a call takes longer. For an async function the time until its
    result counts."""
    message = message or f"it took longer than {timeout_s:g} s"

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        in_main_thread = threading.current_thread() is threading.main_thread()
        run = _with_alarm if in_main_thread and hasattr(signal, "setitimer") else _in_a_thread
        start = time.monotonic()
        result = run(lambda: function(*args, **kwargs), timeout_s, message)
        if not inspect.isawaitable(result):
            return result
        return TimedAwaitable(result, max(0.0, timeout_s - (time.monotonic() - start)), message)

    return call


class _TimeLimitExceeded(BaseException):
    """Not an Exception, so that a function which catches every Exception does not catch this one."""


def _with_alarm(call: Callable[[], Any], timeout_s: float, message: str) -> Any:
    """Interrupts the function itself, so that nothing of it goes on: also a regular expression that never ends."""
    alarm, result = _Alarm(), None
    try:
        with _interval_timer(timeout_s, alarm):
            try:
                alarm.interrupts = True
                result = call()
            finally:
                alarm.interrupts = False
    except _TimeLimitExceeded:  # from the call, or from the line after it
        pass
    if alarm.expired:
        raise TimeoutError(message)
    return result


class _Alarm:
    """Whether the time is over, and whether it still interrupts: not while the timer is taken down."""

    def __init__(self) -> None:
        self.interrupts = self.expired = False

    def __call__(self, *_: Any) -> None:
        self.expired = True
        if self.interrupts:
            raise _TimeLimitExceeded


@contextmanager
def _interval_timer(timeout_s: float, alarm: _Alarm) -> Iterator[None]:
    """Fires repeatedly, in case the first signal is swallowed. A timer that was running before is restored."""
    previous_handler, start = signal.signal(signal.SIGALRM, alarm), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, timeout_s, timeout_s)
    try:
        yield
    finally:
        alarm.interrupts = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 0.001), interval)


def _in_a_thread(call: Callable[[], Any], timeout_s: float, message: str) -> Any:
    """Where there are no signals: what hangs stays behind in a daemon thread, which does not keep the process alive."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise TimeoutError(message)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


class TimedAwaitable:
    """The result of an async function, with the time that is left for it."""

    def __init__(self, result: Any, timeout_s: float, message: str):
        self._result, self.timeout_s, self._message = result, timeout_s, message

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        try:
            return await asyncio.wait_for(without_exit(self._result), self.timeout_s)
        except TimeoutError as error:
            raise TimeoutError(self._message) from error
