"""`read_rows`: JSONL, parquet, a `datasets` folder or module:function; `RowFilter`: bad rows are refused or skipped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from groupwise.core.errors import UserError, require
from groupwise.core.io.files import MAX_JSON_BYTES, open_regular, user_path
from groupwise.core.io.imports import import_function, user_code
from groupwise.core.units import format_bytes

Record = Mapping[str, Any]
OnBadRow = Literal["refuse", "skip"]
_PARQUET_ROWS, _SMALL_BYTES, _MOST_EXPANSION = 64, 256 << 20, 100
"""Of a parquet file: rows that are read at once, what a small one may take in memory, and others by their size."""
_DAMAGED = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError)
"""What pyarrow and datasets raise for files that they have not written."""
_FORMATS = (
    "Name a .jsonl file with one object per line, a .parquet file, a folder that `datasets` wrote with save_to_disk(),"
    " or module:function, which returns the rows"
)


@dataclass(frozen=True)
class Records:
    """The usable rows of a dataset, and where each came from."""

    rows: Sequence[Record]
    sources: Sequence[str]
    """Such as 'train.jsonl, line 12'."""
    numbers: Sequence[int]
    """Line or row number of each, from 1."""


class BadRow(Exception):  # noqa: N818 - it is raised and caught per row, not an error of the program
    """Why one row cannot be used: a reason to count by, and a sentence about this row."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason, self.message = reason, message


class RowFilter:
    """Refuses the first bad row, or skips and counts them, as the user chose in `setting`."""

    def __init__(self, on_bad_row: OnBadRow, setting: str):
        require(on_bad_row in ("refuse", "skip"), setting, on_bad_row, "'refuse' or 'skip'")
        self._refuse, self._setting = on_bad_row == "refuse", setting
        self.skipped: Counter[str] = Counter()
        self.messages: list[str] = []
        """One sentence about each skipped row."""

    def reject(self, source: str, bad: BadRow) -> None:
        if self._refuse:
            raise UserError(
                f"{source}: {bad.message} Fix it, or set {self._setting} to 'skip', which leaves such rows out and"
                " counts them."
            ) from bad
        self.skipped[bad.reason] += 1
        self.messages.append(f"{source}: {bad.message}")


def read_rows(source: str, row_filter: RowFilter, *, setting: str = "The dataset") -> Records:
    """All rows of a dataset that are objects; `setting` is where the user named it."""
    if not source:
        raise UserError(f"{setting} is empty. {_FORMATS}.")
    path = user_path(source)
    if path.exists() and not (path.is_dir() or path.is_file()):
        raise UserError(f"{setting} is '{source}', which is a pipe or a device: it may never end. {_FORMATS}.")
    if path.is_dir():
        unit, rows = "row", _read_dataset_folder(path)
    elif path.suffix == ".parquet" and path.exists():
        unit, rows = "row", _read_parquet(path)
    elif path.exists():
        unit, rows = "line", _read_jsonl(path)
    elif ":" in source:
        unit, rows = "row", _call_function(source, setting)
    else:
        raise UserError(f"{setting} is '{source}', which is not there. {_FORMATS}.")
    usable: list[tuple[Record, str, int]] = []
    for number, row in rows:
        where = f"{source}, {unit} {number}"
        try:
            usable.append((_to_record(row), where, number))
        except BadRow as bad:
            row_filter.reject(where, bad)
    if not usable:
        counts = f" ({format_counts(row_filter.skipped)})" if row_filter.skipped else ""
        raise UserError(f"{source} holds no usable row{counts}. Give at least one.")
    return Records(*zip(*usable, strict=True))


def require_columns(row: Record, columns: Iterable[str], remedy: str = "") -> None:
    """Refuse a row that lacks one of the columns."""
    for name in columns:
        if row.get(name) is None:
            message = f"it has no column '{name}'; it has {', '.join(map(repr, row)) or 'none'}."
            raise BadRow("without a column", f"{message} {remedy}".rstrip())


def format_counts(skipped: Mapping[str, int]) -> str:
    """Such as '3 broken lines, 1 empty prompt'."""
    return ", ".join(f"{number} {reason}" for reason, number in sorted(skipped.items()))


def _to_record(row: Any) -> Record:
    if isinstance(row, bytes):
        try:
            row = json.loads(row.decode("utf-8").rstrip())
        except UnicodeDecodeError as error:
            raise BadRow("broken line", f"byte {error.start + 1} is not UTF-8, as JSON must be.") from error
        except json.JSONDecodeError as error:
            why = f"{error.msg}, column {error.colno}"
            raise BadRow("broken line", f"it is not JSON ({why}): every line must be one whole object.") from error
        except (ValueError, RecursionError) as error:
            raise BadRow("broken line", f"its JSON is nested too deeply or has too many digits ({error}).") from error
    if not isinstance(row, Mapping):
        raise BadRow("broken line", f"it holds {type(row).__name__}, and every row must be an object of columns.")
    return dict(row)


def _read_jsonl(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line that is not blank, with its number."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_JSON_BYTES + 1), b""), start=1):
            if len(line) > MAX_JSON_BYTES:
                limit = format_bytes(MAX_JSON_BYTES)
                raise UserError(f"{path}, line {number} has more than {limit}. Write one object per line.")
            if line.strip():
                yield number, line


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        from pyarrow import ArrowException, parquet, types
    except ImportError as error:
        raise UserError(f"Reading {path} needs a package: pip install pyarrow. Or name a JSONL file.") from error
    most = max(_SMALL_BYTES, _MOST_EXPANSION * path.stat().st_size)
    decoded = number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(_PARQUET_ROWS):
            columns = (column.dictionary_decode() if types.is_dictionary(column.type) else column for column in batch)
            decoded += sum(column.nbytes for column in columns)
            if decoded > most:
                raise UserError(
                    f"{path} holds more than {format_bytes(most)}, over {_MOST_EXPANSION} times its size: a small file"
                    " may repeat one value to exhaust the memory. Write it again without compression, or as JSONL."
                )
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except UserError:
        raise
    except (ArrowException, *_DAMAGED) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is not a parquet file ({reason}). Write it again, or name a JSONL file.") from error


def _read_dataset_folder(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import datasets
        from pyarrow import ArrowException
    except ImportError as error:
        raise UserError(f"Reading {path} needs a package: pip install datasets. Or name a JSONL file.") from error
    for file in (entry for entry in path.iterdir() if not entry.is_dir()):
        open_regular(file, follow_links=True).close()
    try:
        dataset = datasets.load_from_disk(str(path))
        if isinstance(dataset, datasets.DatasetDict):
            raise UserError(_several_splits(path, list(dataset)))
        yield from enumerate(dataset, start=1)
    except UserError:
        raise
    except (ArrowException, *_DAMAGED, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} is not a folder that `datasets` wrote with save_to_disk() ({reason}). {_FORMATS}."
        ) from error


def _several_splits(path: Path, names: Sequence[str]) -> str:
    example = f": name one of them, as {path / names[0]}" if names else ""
    return f"{path} holds {len(names)} splits, {', '.join(names)}{example}."


def _call_function(source: str, setting: str) -> Iterator[tuple[int, Any]]:
    function = import_function(source, setting)
    with user_code(f"{setting} '{source}'"):
        rows = function()
        if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
            raise UserError(
                f"{setting} '{source}' returned {type(rows).__name__}: it must return the rows, a list of objects."
            )
        yield from enumerate(list(rows), start=1)
