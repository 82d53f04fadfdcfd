"""A time limit for functions of a user's own. What is not done by then is missing, as if the function had raised."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any


def with_time_limit(function: Callable[..., Any], seconds: float, told: str | None = None) -> Callable[..., Any]:
    """The function, raising TimeoutError (with the text `told`) when a call takes longer; an async one all in all."""
    told = told or f"it took longer than the {seconds:g} s of judge.seconds"

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        in_main_thread = threading.current_thread() is threading.main_thread()
        run = _with_alarm if in_main_thread and hasattr(signal, "setitimer") else _in_a_thread
        begun = time.monotonic()
        answer = run(lambda: function(*args, **kwargs), seconds, told)
        if not inspect.isawaitable(answer):
            return answer
        return _awaited(answer, max(0.0, seconds - (time.monotonic() - begun)), told)

    return call


class _TimeLimitExceeded(BaseException):
    """Not an Exception: a function that takes every Exception for a wrong answer must not take this one for it."""


def _with_alarm(call: Callable[[], Any], seconds: float, told: str) -> Any:
    """Interrupts the function itself, so that nothing of it runs on: also a regular expression that never ends."""
    with _interval_timer(seconds) as has_rung:
        try:
            answer = call()
        except _TimeLimitExceeded:
            answer = None
    if has_rung:
        raise TimeoutError(told)
    return answer


@contextmanager
def _interval_timer(seconds: float) -> Iterator[list[bool]]:
    """Rings again and again, in case the first is swallowed. An alarm that somebody else had set is set again."""
    has_rung: list[bool] = []

    def ring(*_: Any) -> None:
        has_rung.append(True)
        raise _TimeLimitExceeded

    others, begun = signal.signal(signal.SIGALRM, ring), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield has_rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, others)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begun), 0.001), interval)


def _in_a_thread(call: Callable[[], Any], seconds: float, told: str) -> Any:
    """Where there are no alarms: what hangs stays behind in a thread that the end of the process does not wait for."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(told)
    answer, error = outcome[0]
    if error is not None:
        raise error
    return answer


async def _awaited(answer: Any, seconds: float, told: str) -> Any:
    try:
        return await asyncio.wait_for(answer, seconds)
    except TimeoutError as error:
        raise TimeoutError(told) from error
