"""What goes to stdout and what to stderr, and arguments whose mistakes can be told in one sentence.
RECIPE and its fields, as `train` and `check` take them.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from typing import Any, TypeVar

import tyro

from groupwise.core.errors import UserError
from groupwise.recipes import RECIPE_NAMING_HELP, RECIPES, load_recipe
from groupwise.training.config import Config
from groupwise.workloads.base import WorkloadConfig

T = TypeVar("T")


class ArgumentError(UserError):
    """A mistake in the arguments that has been shown to the user already."""


def parse(kind: type[T], words: list[str], *, prog: str, description: str | None = None, default: T | None = None) -> T:
    """The arguments as a record; a mistake is shown as tyro draws it, and kept as a sentence for `--json`."""
    shown = io.StringIO()
    more: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with redirect_stderr(shown):
            return tyro.cli(kind, args=words, prog=prog, description=description, **more)
    except SystemExit as leaving:
        print(shown.getvalue(), end="", file=sys.stderr)
        if not leaving.code:
            raise
        sentence = " ".join(re.sub("[\u2500-\u257f]", " ", shown.getvalue()).split())
        raise ArgumentError(sentence.split("For full helptext")[0].strip()) from None


def print_json(content: Mapping[str, Any]) -> None:
    """The one object on stdout; of several ranks, only the first speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(content))


def quiet_stdout(as_json: bool) -> Any:
    """What a user's own code prints must not stand beside the one JSON object."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def read_config(command: str, words: list[str], description: str) -> Config:
    """The recipe named first, with the fields that the user changed."""
    if not words or words[0].startswith("-"):
        if "-h" in words or "--help" in words:
            _generic_help(command, description)
        raise UserError(f"`groupwise {command}` needs a recipe: groupwise {command} RECIPE. {RECIPE_NAMING_HELP}")
    if any(word.split("=")[0] == "--ranks" for word in words):
        raise UserError(
            "--ranks is not a field of a recipe: there are as many ranks as the launcher starts. Use `torchrun"
            f" --nproc-per-node N -m groupwise {command} ...`, or `accelerate launch` with --num-processes N."
        )
    config = load_recipe(words[0])
    return parse(Config, words[1:], prog=f"groupwise {command} {words[0]}", description=description, default=config)


def _generic_help(command: str, description: str) -> None:
    """Help for no recipe in particular: how to name one, and the fields that all of them have."""
    built_in = f"Built-in recipes: {', '.join(RECIPES)}.\n\n" if RECIPES else ""
    parse(
        Config,
        ["--help"],
        default=Config(WorkloadConfig()),
        prog=f"groupwise {command} RECIPE",
        description=f"{description}\n\n{RECIPE_NAMING_HELP}\n\n{built_in}"
        f"These fields every recipe has; `groupwise {command} RECIPE --help` shows its own too, with its defaults.",
    )
