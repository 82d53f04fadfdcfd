"""Command-line arguments with tyro: RECIPE and its fields, errors as one sentence, and `--json` output."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from typing import Any, TypeVar

import tyro

from groupwise.core.errors import UserError
from groupwise.core.files import to_json
from groupwise.recipes import RECIPE_NAMING_HELP, RECIPES, load_recipe
from groupwise.training.config import Config
from groupwise.workloads.base import WorkloadConfig

T = TypeVar("T")
_BOX = "[\u2500-\u257f]|-{3,}"
"""The lines that tyro draws around messages, in Unicode and in ASCII."""


class ArgumentError(UserError):
    """A mistake in the arguments that has already been printed."""


def parse(
    kind: type[T], arguments: Sequence[str], *, prog: str, description: str | None = None, default: T | None = None
) -> T:
    """The arguments as a dataclass. A mistake is printed as tyro formats it, and raised as one sentence for --json."""
    printed = io.StringIO()
    more: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with redirect_stderr(printed):
            return tyro.cli(kind, args=arguments, prog=prog, description=description, **more)
    except SystemExit as leaving:
        print(printed.getvalue(), end="", file=sys.stderr)
        if not leaving.code:
            raise
        sentence = " ".join(re.sub(_BOX, " ", printed.getvalue()).split())
        raise ArgumentError(sentence.split("For full helptext")[0].strip()) from None


def print_json(content: Mapping[str, Any]) -> None:
    """One object on stdout, from the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(to_json(content))


def quiet_stdout(as_json: bool) -> Any:
    """With `--json`, what a user's own code prints goes to stderr."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def read_config(command: str, arguments: Sequence[str], description: str) -> Config:
    """The config of the recipe that is named first, with the fields that the user changed."""
    if not arguments or arguments[0].startswith("-"):
        if "-h" in arguments or "--help" in arguments:
            _generic_help(command, description)
        raise UserError(f"`groupwise {command}` needs a recipe: groupwise {command} RECIPE. {RECIPE_NAMING_HELP}")
    if any(argument.split("=")[0] == "--ranks" for argument in arguments):
        raise UserError(
            "--ranks is not a field of a recipe: the launcher decides how many ranks there are. Use `torchrun"
            f" --nproc-per-node N -m groupwise {command} ...`, or `accelerate launch` with --num-processes N."
        )
    recipe, *fields = arguments
    prog = f"groupwise {command} {recipe}"
    return parse(Config, fields, prog=prog, description=description, default=load_recipe(recipe))


def _generic_help(command: str, description: str) -> None:
    """How to name a recipe, and the fields that all recipes have."""
    parse(
        Config,
        ["--help"],
        default=Config(WorkloadConfig()),
        prog=f"groupwise {command} RECIPE",
        description=f"{description}\n\n{RECIPE_NAMING_HELP}\n\nBuilt-in recipes: {', '.join(RECIPES)}.\n\n"
        f"Every recipe has the fields below. `groupwise {command} RECIPE --help` shows those of its workload too, and"
        " its defaults.",
    )
