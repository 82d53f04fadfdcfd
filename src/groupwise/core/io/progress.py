"""A count of the pieces of work that this process has done, so that a watchdog can tell slow from stuck."""

from __future__ import annotations

_pieces = 0


def advance() -> None:
    """One more piece is done: a pass, a decoding step, an answer of a service."""
    global _pieces  # noqa: PLW0603 - the process as a whole gets on, or does not
    _pieces += 1


def pieces_done() -> int:
    return _pieces
