"""Keeps a user's function from ending this process, or from going on in two of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from os import _exit as exit_process
from typing import Any, NoReturn

__all__ = ["ExitCalledError", "contain_exits", "exit_process", "without_exit"]


class ExitCalledError(Exception):
    """A user's function wanted to end the process."""


@contextmanager
def contain_exits() -> Iterator[None]:
    """Within, sys.exit() and os._exit() raise `ExitCalledError`; a forked child that returns from here is ended.

    Without this a rank would leave without a word and with the code of a success, or a child of `os.fork()` would go on
    training beside its parent. Children that end by themselves, as those of `multiprocessing` do, are left alone.
    """
    process, previous = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:
            exit_process(status)
        raise ExitCalledError(f"it called os._exit({status}), which would end the run without a word")

    os._exit = refuse
    try:
        yield
    except SystemExit as error:
        raise _exit_called(error) from error
    finally:
        os._exit = previous
        if os.getpid() != process:
            sys.stderr.write("groupwise: a function of yours has forked, and its child came back from it: ended.\n")
            sys.stderr.flush()
            exit_process(1)


async def without_exit(result: Awaitable[Any]) -> Any:
    """The result; sys.exit() within raises `ExitCalledError` instead of ending the event loop."""
    try:
        return await result
    except SystemExit as error:
        raise _exit_called(error) from error


def _exit_called(error: SystemExit) -> ExitCalledError:
    return ExitCalledError(f"it called sys.exit({error.code!r}), which would end the run")
