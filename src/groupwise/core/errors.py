"""The one exception that means "the user can fix this": shown as a paragraph, never as a traceback."""

from __future__ import annotations

import dataclasses
from typing import Any

_NUMBERS = {
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "bool": (bool,),
    "str": (str,),
}

_OOM_MESSAGES = ("out of memory", "not enough memory", "allocate memory", "bad_alloc", "alloc_failed")
"""Words of a failed allocation, as torch, its libraries and the system put it."""


class UserError(ValueError):
    """A value that cannot be used: the message holds the value, the rule and the remedy."""


class OutOfMemoryError(UserError):
    """Some rank ran out of memory; raised on all of them, so that they can agree on smaller pieces."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that memory ran out: on an accelerator, on the CPU, or in Python."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        named = any(kind.__name__ in ("OutOfMemoryError", "MemoryError") for kind in type(error).__mro__)
        text = str(error).lower()
        if named or (isinstance(error, RuntimeError | OSError) and any(words in text for words in _OOM_MESSAGES)):
            return True
        error = error.__cause__ or error.__context__
    return False


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Refuse a setting that breaks its rule."""
    if not holds:
        raise UserError(f"{name} is {value}: it must be {rule}.")


def require_types(config: Any, prefix: str = "") -> None:
    """Refuse a setting of a config that is not of the type it is declared with (numbers, texts and flags)."""
    for field in dataclasses.fields(config):
        allowed, value = _NUMBERS.get(str(field.type)), getattr(config, field.name)
        wrong_flag = isinstance(value, bool) and field.type != "bool"
        if allowed and (wrong_flag or not isinstance(value, allowed)):
            raise UserError(f"{prefix}{field.name} is {value!r}: it must be of type {field.type}.")
