"""Rows of a dataset from a JSONL file or a folder that `datasets` saved. What is broken is named by its line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from groupwise.core.errors import UserError

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Records:
    """Rows that all have the same columns, each with where it came from."""

    rows: Sequence[Record]
    places: Sequence[str]
    """Such as 'train.jsonl, line 12'."""
    dropped: Counter[str]
    """How many rows were left out, by reason."""


class BadRowError(Exception):
    """Why one row cannot be used: a reason to count by, and a sentence about this row."""

    def __init__(self, reason: str, told: str):
        super().__init__(told)
        self.reason, self.told = reason, told


class RowFilter:
    """Refuses the first bad row, or drops and counts them, as the user chose."""

    def __init__(self, bad_rows: Literal["refuse", "drop"]):
        self._refuse = bad_rows == "refuse"
        self.dropped: Counter[str] = Counter()

    def drop(self, place: str, bad: BadRowError) -> None:
        if self._refuse:
            raise UserError(
                f"{place}: {bad.told} Mend it, or take data.bad_rows 'drop' to leave such rows out and have them"
                " counted."
            ) from bad
        self.dropped[bad.reason] += 1


def read_rows(source: str, *, required: tuple[str, ...], bad_rows: Literal["refuse", "drop"]) -> Records:
    """All usable rows. Each must have the required columns and those of the first row."""
    path, sieve = Path(source).expanduser(), RowFilter(bad_rows)
    if not path.exists():
        raise UserError(
            f"There is no dataset at {source}. Name a JSONL file with one object a line, or a folder that `datasets`"
            " has written with save_to_disk()."
        )
    rows, places = [], []
    columns: set[str] | None = None
    for place, found in _read_dataset_folder(path) if path.is_dir() else _read_jsonl(path):
        try:
            row = _parsed(found)
            _check_columns(row, columns, required)
        except BadRowError as bad:
            sieve.drop(place, bad)
            continue
        columns = columns or set(row)
        rows.append(row)
        places.append(place)
    if not rows:
        told = f" ({format_counts(sieve.dropped)})" if sieve.dropped else ""
        raise UserError(f"{source} holds no usable row{told}. Give at least one.")
    return Records(rows, places, sieve.dropped)


def format_counts(dropped: Mapping[str, int]) -> str:
    """Such as '3 broken lines, 1 empty prompt'."""
    return ", ".join(f"{number} {reason}" for reason, number in sorted(dropped.items()))


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """Every line that is not blank, and where it stands."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}, line {number}", line


def _parsed(found: Any) -> Record:
    if not isinstance(found, bytes):
        return dict(found)
    try:
        row = json.loads(found.decode("utf-8").rstrip())
    except UnicodeDecodeError as error:
        raise BadRowError("broken line", f"byte {error.start + 1} is not UTF-8, as JSON must be.") from error
    except json.JSONDecodeError as error:
        why = f"{error.msg}, column {error.colno}"
        raise BadRowError("broken line", f"it is not JSON ({why}): every line must be one whole object.") from error
    if not isinstance(row, dict):
        raise BadRowError(
            "broken line", f"it holds {type(row).__name__}, where every line must be an object of columns."
        )
    return row


def _check_columns(row: Record, columns: set[str] | None, required: tuple[str, ...]) -> None:
    for name in required:
        if name not in row or row[name] is None:
            raise BadRowError(
                "without a column",
                f"it has no column '{name}'; it has {', '.join(map(repr, row)) or 'none'}. data.prompt_column and"
                " judge.answer_column say which columns are used.",
            )
    if columns is not None and set(row) != columns:
        odd = sorted(set(row) ^ columns)[0]
        raise BadRowError(
            "with other columns",
            f"column '{odd}' is {'missing here' if odd in columns else 'not in the rows before'}: all rows must have"
            " the same ones, because rewards receive them as lists.",
        )


def _read_dataset_folder(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{path} is a folder, and reading what `datasets` has saved needs that package: pip install datasets. Or"
            " name a JSONL file."
        ) from error
    try:
        found = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise UserError(
            f"{path} is not a folder that `datasets` has written with save_to_disk() ({error}). Name one, or a JSONL"
            " file."
        ) from error
    if isinstance(found, datasets.DatasetDict):
        names = list(found)
        raise UserError(
            f"{path} holds {len(names)} splits, {', '.join(names)}: name one of them, as {path / names[0]}."
        )
    for number, row in enumerate(found, start=1):
        yield f"{path}, row {number}", row
