"""Files that survive a crash, and files from strangers: atomic writes, bounded reads of regular files, JSON, JSONL.

A folder may come from someone else: nothing but regular files is opened, JSON has a limit on its bytes and its depth,
and links are not followed unless the reader says so, as for datasets and for models in the hub's cache.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from groupwise.core.errors import UserError
from groupwise.core.units import format_bytes

MAX_JSON_BYTES = 64 << 20
MAX_LINE_BYTES = 4 << 20
_MAX_DEPTH = 64
"""Lists and objects within each other. Ours have fewer than ten."""
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
"""Opening a pipe would wait for its writer."""
_CACHE_VARIABLE = "GROUPWISE_CACHE"


def ignore_message(_text: str) -> None:
    """For readers that have nobody to warn."""


def cache_folder() -> Path:
    """The folder of things that can be computed again: $GROUPWISE_CACHE, or ~/.cache/groupwise."""
    named = os.environ.get(_CACHE_VARIABLE)
    try:
        return Path(named) if named else Path.home() / ".cache" / "groupwise"
    except RuntimeError as error:
        raise UserError(f"There is no home folder to keep a cache in. Name one in ${_CACHE_VARIABLE}.") from error


def user_path(text: str) -> Path:
    """A path with the home folder in place of ~; as it is where there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file: after a crash it holds the old content or the new, never a part of it.

    A link of this name is replaced, not followed; so is what an earlier crash left beside it.
    """
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    write_synced(temporary, content)
    temporary.replace(path)
    sync_folder(path.parent)


def write_synced(path: Path, content: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a new file, at once or in pieces, and wait until the disk has it."""
    with _named_errors(path), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's entries: a rename is durable only then."""
    _sync(folder)


def sync_file(path: Path) -> None:
    """Wait until the disk has what was appended to a file, if there is one."""
    with suppress(FileNotFoundError):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | _NO_FOLLOW)
    try:
        with _named_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """The system does not say which file it could not write."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def open_regular(path: Path, *, max_bytes: int | None = None, follow_links: bool = False) -> io.BufferedReader:
    """A file opened for reading. Refuses folders, pipes and devices, files that are too large, and usually links."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _NO_WAIT | (0 if follow_links else _NO_FOLLOW))
    except OSError as error:
        is_refused = not follow_links and path.is_symlink()
        reason = "it is a link, and links are not followed" if is_refused else error.strerror
        raise UserError(f"{path} cannot be read: {reason}.") from error
    problem = _problem(os.fstat(descriptor), max_bytes)
    if problem:
        os.close(descriptor)
        raise UserError(f"{path} cannot be read: {problem}.")
    return os.fdopen(descriptor, "rb")


def _problem(status: os.stat_result, max_bytes: int | None) -> str:
    """Why an open file is not read; empty where it is."""
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if max_bytes is not None and status.st_size > max_bytes:
        return f"it has {format_bytes(status.st_size)}, and at most {format_bytes(max_bytes)} are read of such a file"
    return ""


def read_bytes(path: Path, *, max_bytes: int = MAX_JSON_BYTES, follow_links: bool = False) -> bytes:
    with open_regular(path, max_bytes=max_bytes, follow_links=follow_links) as file:
        return file.read()


def read_json(path: Path, *, follow_links: bool = False) -> dict[str, Any]:
    """The JSON object of a file; anything else in it is refused."""
    try:
        content = parse_json(read_bytes(path, follow_links=follow_links))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}). Restore it.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged (it holds a {_json_type(content)}, not an object). Restore it.")
    return content


def parse_json(text: bytes) -> Any:
    """A JSON value. ValueError where the text is none, or is nested too deeply."""
    try:
        content = json.loads(text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level, depth = [content], 0
    while level := [entry for value in level if isinstance(value, list | dict) for entry in _entries(value)]:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
    return content


def to_json(content: Any, *, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinity become null, tensors and arrays lists, anything else text."""
    return json.dumps(_without_nan(content), indent=indent, default=_json_value, allow_nan=False)


def read_jsonl(path: Path, warn: Callable[[str], None] = ignore_message) -> list[dict[str, Any]]:
    """The objects of a log of steps that this process or an earlier one appended to; a missing file has none.

    A last line cut short by a crash is ignored. Other lines that are no object with a step are left out with a warning.
    """
    return [entry for _, entry in read_log(path, warn)]


def read_log(path: Path, warn: Callable[[str], None] = ignore_message) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """As `read_jsonl`, one line after the other: its bytes, and the object that they hold."""
    if not os.path.lexists(path):
        return
    damaged: list[int] = []
    with open_regular(path) as file:
        for number, line in enumerate(_lines(file), start=1):
            entry = _step_entry(line)
            if entry is not None:
                yield line, entry
            elif line.endswith(b"\n"):
                damaged.append(number)
            else:
                _warn_of_cut_line(path, line, warn)
    if damaged:
        lines = f"line {damaged[0]} is" if len(damaged) == 1 else f"{len(damaged)} lines, the first {damaged[0]}, are"
        warn(f"{path.name}: {lines} no object with a step, and left out.")


def append_jsonl(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_FOLLOW, 0o666)
    with _named_errors(path), open(descriptor, "a", encoding="utf-8") as file:
        file.writelines(to_json(entry) + "\n" for entry in entries)


def _lines(file: io.BufferedReader) -> Iterator[bytes]:
    """Lines of at most MAX_LINE_BYTES; of a longer one only its end, which is no JSON, so memory stays bounded."""
    while line := file.readline(MAX_LINE_BYTES):
        while len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = b"\0" + file.readline(MAX_LINE_BYTES - 1)
        yield line


def _step_entry(line: bytes) -> dict[str, Any] | None:
    """The object of a complete line, if it has a step."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    step = entry.get("step") if isinstance(entry, dict) else None
    return entry if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53 else None


def _warn_of_cut_line(path: Path, line: bytes, warn: Callable[[str], None]) -> None:
    """A crash of the process leaves the start of a line, which is ordinary; a power cut leaves zeros."""
    if not line.lstrip().startswith(b"{") or b"\0" in line:
        warn(f"{path.name}: {len(line)} bytes at its end are no line of ours, and left out.")


def _entries(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _json_type(value: Any) -> str:
    names = {list: "list", str: "text", bool: "truth value", type(None): "null"}
    return names.get(type(value), "number")


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return {name: _without_nan(entry) for name, entry in value.items()} if isinstance(value, Mapping) else value


def _json_value(value: Any) -> Any:
    return _without_nan(value.tolist()) if hasattr(value, "tolist") else str(value)
