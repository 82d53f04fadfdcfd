"""Whether JSON values from a file fit the fields of a dataclass, before they are used."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

_PLAIN: dict[Any, Any] = {
    int: int,
    float: (int, float),
    str: str,
    bool: bool,
    Path: str,
    type(None): type(None),
}


_LARGEST = 1e300
"""Sums of such numbers are still finite."""


def is_number(value: object) -> TypeGuard[float]:
    """Whether a JSON value is a finite number that can be counted with: JSON's own may have thousands of digits."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < _LARGEST and math.isfinite(value)


def has_type(value: Any, hint: Any) -> bool:
    """Whether a JSON value can be of a field's type; types that JSON has no form for are not checked."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, option) for option in arguments)
    if origin is Literal:
        return value in arguments
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, dict) and all(has_type(entry, arguments[1]) for entry in value.values())
    if origin is not None and issubclass(origin, Sequence):
        fixed = origin is tuple and arguments[-1] is not ...
        inner = arguments if fixed else arguments[:1] * (len(value) if isinstance(value, list) else 0)
        return isinstance(value, list) and len(inner) == len(value) and all(map(has_type, value, inner))
    plain = hint not in _PLAIN or isinstance(value, _PLAIN[hint])
    return plain and (hint not in _PLAIN or isinstance(value, bool) <= (hint is bool))


def misfit(record: Any, content: Any, *, ignore: Sequence[str] = ()) -> str | None:
    """Why a JSON value does not hold the fields of a dataclass; None where it does."""
    if not isinstance(content, dict):
        return "it is no object"
    hints = typing.get_type_hints(record)
    fields = {field.name: field for field in dataclasses.fields(record) if field.name not in ignore}
    for name in content:
        if name not in fields:
            return f"{str(name)[:80]!r} is unknown"
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if name not in content and required:
            return f"{name!r} is missing"
        if name in content and not has_type(content[name], hints[name]):
            return f"{name!r} is {repr(content[name])[:80]}"
    return None
