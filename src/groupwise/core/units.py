"""Bytes to and from text such as 32GiB."""

from __future__ import annotations

import re

from groupwise.core.errors import UserError

_BINARY = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_MOST = float(1 << 60)
_UNITS = {unit.lower(): size for unit, size in (_BINARY | _DECIMAL).items()}


def parse_bytes(text: str, name: str = "size") -> int:
    """A number of bytes from '32GiB', '80 GB' or '1000'."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise UserError(
            f"{name} is '{text}': it must be a number and a unit, such as 32GiB or 80GB. Units: B, KiB, MiB, GiB, TiB"
            " (powers of 1024) and kB, MB, GB, TB (powers of 1000)."
        )
    size = float(match[1]) * _UNITS[match[2].lower()]
    if not 1 <= size <= _MOST:
        raise UserError(f"{name} is '{text[:40]}': it must be above 0 and at most 1048576 TiB.")
    return int(size)


def format_bytes(size: float) -> str:
    """A number of bytes as text: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
