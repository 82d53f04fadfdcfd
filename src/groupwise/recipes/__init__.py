"""Runnable experiments by name. A recipe is a function without arguments that returns a full config."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from groupwise.core.errors import UserError
from groupwise.train.config import Config

RECIPES: dict[str, str] = {}
"""Built-in recipes: name to `module:function`."""

HOW_TO_NAME = (
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
        raise UserError(f"There is no recipe '{name}'.{hint} {known} {HOW_TO_NAME}")
    config = _call(module, function_name or "recipe", name)
    return dataclasses.replace(config, recipe=name)


def _from_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UserError(f"There is no file {path} for recipe '{name}'. Check the path, relative to {Path.cwd()}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _from_module(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"Recipe '{name}' cannot be imported: {error}. {HOW_TO_NAME}") from error


def _call(module: ModuleType, function: str, name: str) -> Config:
    if not hasattr(module, function):
        raise UserError(f"Recipe '{name}' names no function: {module.__name__} has no '{function}'. {HOW_TO_NAME}")
    config = getattr(module, function)()
    if not isinstance(config, Config):
        raise UserError(f"Recipe '{name}' returned {type(config).__name__}: it must return a groupwise.Config.")
    return config
