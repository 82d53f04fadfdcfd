"""Ends this process from a thread beside the main one, which may be stuck: with a message, also for `--json`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from groupwise.core.io.user_code import exit_process

_listeners: list[Callable[[str], object]] = []


@contextmanager
def heard_at_the_end(listener: Callable[[str], object]) -> Iterator[None]:
    """Within, the listener gets the message with which a thread ends the process."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def end_process(message: str, *, code: int) -> NoReturn:
    """Print the message and exit at once: nothing else is run, and no thread is waited for."""
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    sys.stderr.write(f"groupwise{rank}: {message}\n")
    sys.stderr.flush()
    try:
        for listener in _listeners:
            listener(message)
    finally:
        exit_process(code)
