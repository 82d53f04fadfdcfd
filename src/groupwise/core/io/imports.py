"""Import an object that a user names as "module:name" or "file.py:name", with one set of error messages."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from groupwise.core.errors import UserError
from groupwise.core.io.files import user_path

_files: dict[Path, tuple[int, ModuleType]] = {}
"""Modules imported from files, with the time of the file's last change: a file that did not change runs once."""
_allowed: frozenset[str] | None = None
"""What may be imported or called while settings come from a file; None while they come from the user."""


@contextmanager
def only_named_code(allowed: Iterable[str]) -> Iterator[None]:
    """Within, only these specs (and reward services) are used: settings that someone else wrote may name others."""
    global _allowed  # noqa: PLW0603 - one gate for all that is imported by name, whoever asks
    before, _allowed = _allowed, frozenset(allowed)
    try:
        yield
    finally:
        _allowed = before


def settings_are_trusted() -> bool:
    """Whether settings come from the user; else from a folder that someone else may have written."""
    return _allowed is None


def refuse_unnamed_code(spec: str, setting: str) -> None:
    """Refuse code or a service that only the settings of a run name, and not the user."""
    if _allowed is not None and spec not in _allowed:
        raise UserError(
            f"{setting} '{spec}' is named by the run's config.json, not by you or the recipe: it would be run with your"
            f" rights. Look at it, and if you trust it, add --code {spec}"
        )


def import_object(spec: str, setting: str, *, known: Iterable[str] = (), default_name: str = "") -> Any:
    """The object named by `spec`, which is the value of `setting`. Modules are searched in the current folder too.

    `known` are the names that the caller accepts besides; they are listed when `spec` is neither. With `default_name`
    a file may be given alone.
    """
    source, _, name = spec.rpartition(":") if ":" in spec else (spec, "", "")
    is_file = source.endswith(".py")
    name = name or (default_name if is_file else "")
    if not source or not name:
        names = ", ".join(known)
        raise UserError(
            f"{setting} '{spec}' must be {f'one of {names}, or ' if names else ''}an object of your own, written as"
            " 'module:name' or 'file.py:name'."
        )
    refuse_unnamed_code(spec, setting)
    try:
        module = _import_file(user_path(source)) if is_file else _import_module(source)
    except UserError as error:
        raise UserError(f"{setting} '{spec}' cannot be imported. {error}") from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise UserError(
            f"{setting} '{spec}' cannot be imported. {source} has no '{name}'. Check the spelling."
        ) from error


def resolve_folder(spec: str, setting: str) -> str:
    """`package:folder` as the path of a folder inside an installed package; anything else as it is.

    Nothing is imported: of a dotted name only the first part is looked up, the others are folders.
    """
    package, _, folder = spec.partition(":")
    if not folder:
        return spec
    name, *inner = package.split(".")
    folder = "/".join([*inner, folder])
    try:
        found = importlib.util.find_spec(name) if name.isidentifier() else None
    except ValueError:
        found = None
    if found is None or not found.submodule_search_locations:
        raise UserError(
            f"{setting} is '{spec}', and there is no package {package}. Name a folder, or package:folder for one that"
            " is shipped in a Python package."
        )
    return str(Path(found.submodule_search_locations[0]) / folder)


def import_function(spec: str, setting: str, *, known: Iterable[str] = ()) -> Any:
    """As `import_object`, for what will be called."""
    function = import_object(spec, setting, known=known)
    if not callable(function):
        raise UserError(f"{setting} '{spec}' is {type(function).__name__}, which cannot be called. Name a function.")
    return function


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Reports what a user's code raises within as a UserError that names the error and its line."""
    try:
        yield
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"{what} has a syntax error: {error.msg} ({error.filename}:{error.lineno}).") from error
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
        line = f"{frames[-1].filename}:{frames[-1].lineno}"
        raise UserError(f"{what} raised {type(error).__name__}: {error} ({line}).") from error


def _import_module(name: str) -> ModuleType:
    _search_in(Path.cwd())
    with user_code(f"The module {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there; what it imports is not
            raise UserError(
                f"{error}. Check the spelling, and that the module is on PYTHONPATH or in {Path.cwd()}."
            ) from error


def _import_file(file: Path) -> ModuleType:
    path = file.resolve()
    if not path.is_file():
        raise UserError(f"There is no file {file}. Check the path, relative to {Path.cwd()}.")
    changed = path.stat().st_mtime_ns
    if path in _files and _files[path][0] == changed:
        return _files[path][1]
    # Under its own name where that is free, so that files beside it can import it; never in place of another module.
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_{abs(hash(path)):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _search_in(path.parent)
    sys.modules[name] = module
    try:
        with user_code(f"The file {file}"):
            spec.loader.exec_module(module)
    except UserError:
        del sys.modules[name]
        raise
    _files[path] = (changed, module)
    return module


def _search_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
