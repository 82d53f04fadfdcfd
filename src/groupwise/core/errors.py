"""UserError, which the command line shows as a paragraph without a traceback, and its kinds; checks of settings."""

from __future__ import annotations

import dataclasses
import errno
import re
from typing import Any

_CHECKED_TYPES = {
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "bool": (bool,),
    "str": (str,),
}

_PATH_FAULTS = {
    getattr(errno, name)
    for name in [
        "ENAMETOOLONG",
        "EACCES",
        "EPERM",
        "ENOSPC",
        "EDQUOT",
        "EROFS",
        "EIO",
        "EFBIG",
        "ELOOP",
        "EISDIR",
        "ENOTDIR",
    ]
    if hasattr(errno, name)
}
"""Errors of the operating system about paths, rights and disks, which a user can mend."""
DISK_FAULTS = (errno.ENOSPC, errno.EIO, errno.EFBIG)
_OOM_MESSAGES = ("out of memory", "not enough memory", "allocate memory", "bad_alloc", "alloc_failed")
"""Parts of the messages of failed allocations in torch, its libraries and the operating system."""


class UserError(ValueError):
    """A value that cannot be used: the message holds the value, the rule and the remedy."""

    exit_code = 2
    """Of the command that it ends."""
    on_all_ranks = False
    """Whether every rank raises it, so that all of them can still save together."""


class OutOfMemoryError(UserError):
    """A rank ran out of memory. Raised on all ranks, so that all of them retry with smaller batches."""


class DeviceLostError(UserError):
    """The device of a rank has failed and does not answer any more. Raised on all ranks."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error or one of its causes means that memory ran out: on an accelerator, on the CPU or in Python."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        by_type = any(kind.__name__ in ("OutOfMemoryError", "MemoryError") for kind in type(error).__mro__)
        text = str(error).lower()
        if by_type or (isinstance(error, RuntimeError | OSError) and any(part in text for part in _OOM_MESSAGES)):
            return True
        error = error.__cause__ or error.__context__
    return False


def path_error_message(error: BaseException) -> str | None:
    """What the operating system says about a path or a disk, as a sentence; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _PATH_FAULTS or error.filename is None:
        return None
    remedy = " What was complete is kept; --resume continues." if error.errno in DISK_FAULTS else ""
    return f"{error.filename} cannot be used: {error.strerror}.{remedy}"


def printable(text: str) -> str:
    """Without control characters: a stranger's names would move the cursor, or change what was printed before."""
    return re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", lambda character: f"\\x{ord(character[0]):02x}", text)


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Refuse a setting that breaks its rule."""
    if not holds:
        raise UserError(f"{name} is {value}: it must be {rule}.")


def require_types(config: Any, prefix: str = "") -> None:
    """Refuse a setting whose value does not have the declared type (numbers, strings and booleans)."""
    for field in dataclasses.fields(config):
        allowed, value = _CHECKED_TYPES.get(str(field.type)), getattr(config, field.name)
        wrong_flag = isinstance(value, bool) and field.type != "bool"
        if allowed and (wrong_flag or not isinstance(value, allowed)):
            raise UserError(f"{prefix}{field.name} is {value!r}: it must be of type {field.type}.")
