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


class UserError(ValueError):
    """A value that cannot be used: the message holds the value, the rule and the remedy."""


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
