"""What a workload has to say about a finished run. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ReportTable:
    """A table for the screen: all cells are text."""

    title: str
    columns: Sequence[str]
    """The first is set to the left, the others to the right."""
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Report:
    figures: Mapping[str, Any]
    """JSON values; they become part of eval.json."""
    tables: Sequence[ReportTable] = ()
    pictures: Mapping[str, Callable[[Path], None]] | None = None
    """By file name: writes the picture to a path in the run folder."""
