"""Runnable experiments by name. A recipe is a function without arguments that returns a full config."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from groupwise.core.errors import UserError
from groupwise.training.config import Config

RECIPES: dict[str, str] = {
    "chat": "groupwise.recipes.chat:recipe",
    "chat-gsm8k": "groupwise.recipes.chat_gsm8k:recipe",
    "controller": "groupwise.recipes.controller:recipe",
    "controller-molmoe": "groupwise.recipes.controller_molmoe:recipe",
    "flow": "groupwise.recipes.flow:recipe",
    "flow-recam": "groupwise.recipes.flow_recam:recipe",
    "flow-sd3": "groupwise.recipes.flow_sd3:recipe",
}
"""Built-in recipes: name to `module:function`."""

RECIPE_NAMING_HELP = (
    "A recipe is a built-in name, a file of yours such as examples/doors.py (its function `recipe`, or another one as"
    " file.py:function), or module:function."
)


def load_recipe(name: str) -> Config:
    """The config of a recipe, marked with the name it came from."""
    module_name, _, function_name = RECIPES.get(name, name).partition(":")
    if module_name.endswith(".py"):
        module = _from_file(Path(module_name), name)
    elif function_name:
        module = _from_module(module_name, name)
    else:
        close = get_close_matches(name, RECIPES, n=1)
        known = f"Built-in: {', '.join(RECIPES)}." if RECIPES else "There is no built-in one yet."
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise UserError(f"There is no recipe '{name}'.{hint} {known} {RECIPE_NAMING_HELP}")
    config = _call(module, function_name or "recipe", name)
    if module_name.endswith(".py"):  # found again from any folder
        name = ":".join([str(Path(module_name).resolve()), *filter(None, [function_name])])
    return dataclasses.replace(config, recipe=name)


def _from_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UserError(f"There is no file {path} for recipe '{name}'. Check the path, relative to {Path.cwd()}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))  # its neighbours can be imported, as from a script
    with _told(f"The file {path}"):
        spec.loader.exec_module(module)
    return module


def _from_module(module: str, name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with _told(f"The module {module}"):
            return importlib.import_module(module)
    except UserError as error:
        raise UserError(f"Recipe '{name}' cannot be imported. {error} {RECIPE_NAMING_HELP}") from error


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever a user's file raises is theirs to mend: say what, and where."""
    try:
        yield
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"{what} has a syntax error: {error.msg} ({error.filename}:{error.lineno}).") from error
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        raise UserError(f"{what} raised {type(error).__name__}: {error} ({place}).") from error


def _call(module: ModuleType, function: str, name: str) -> Config:
    if not hasattr(module, function):
        raise UserError(
            f"Recipe '{name}' names no function: {module.__name__} has no '{function}'. {RECIPE_NAMING_HELP}"
        )
    with _told(f"The recipe {function}() of {module.__name__}"):
        config = getattr(module, function)()
    if not isinstance(config, Config):
        raise UserError(f"Recipe '{name}' returned {type(config).__name__}: it must return a groupwise.Config.")
    return config
