"""Command-line arguments with tyro: RECIPE and its fields, errors as one sentence, and `--json` output."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass, replace
from typing import Any, TextIO, TypeVar

import tyro

from groupwise.core.errors import UserError
from groupwise.core.io.files import to_json
from groupwise.recipes import RECIPE_NAMING_HELP, RECIPES, load_recipe
from groupwise.training.config import Config
from groupwise.workloads.base import WorkloadConfig

T = TypeVar("T")
_BOX = "[\u2500-\u257f]|-{3,}"
"""The lines that tyro draws around messages, in Unicode and in ASCII."""
_HUGE = 1 << 63


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
            parsed: T = tyro.cli(kind, args=arguments, prog=prog, description=description, **more)
        _refuse_huge(parsed)
        return parsed
    except SystemExit as leaving:
        print(printed.getvalue(), end="", file=sys.stderr)
        if not leaving.code:
            raise
        sentence = " ".join(re.sub(_BOX, " ", printed.getvalue()).split())
        raise ArgumentError(sentence.split("For full helptext")[0].strip()) from None


def _refuse_huge(settings: Any, prefix: str = "") -> None:
    """Whole numbers that no machine counts to: sums of them overflow, wherever they are used first."""
    for entry in fields(settings) if is_dataclass(settings) else ():
        value, name = getattr(settings, entry.name), f"{prefix}{entry.name}"
        for number in value if isinstance(value, tuple | list) else (value,):
            if isinstance(number, int) and abs(number) >= _HUGE:
                raise UserError(f"{name} has {len(str(abs(number)))} digits: it must be below 2^63 (19 digits).")
        _refuse_huge(value, f"{name}.")


def print_json(content: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """One object on stdout, from the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        print(to_json(content), file=stream, flush=stream is not None)


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
    recipe, *changes = arguments
    default, changes = split_pairs(load_recipe(recipe), changes)
    return parse(Config, changes, prog=f"groupwise {command} {recipe}", description=description, default=default)


def split_pairs(config: T, arguments: Sequence[str], prefix: str = "--") -> tuple[T, list[str]]:
    """`--reward.weights NAME VALUE ...` as one argument for each name, where the recipe's mapping has entries.

    Of an empty mapping tyro takes such pairs itself, of one with entries it takes only `--reward.weights.NAME VALUE`,
    and only for names that are there: a new name gets an entry first.
    """
    if not is_dataclass(config) or isinstance(config, type):
        return config, list(arguments)
    changed, remaining = dict[str, Any](), list(arguments)
    for entry in fields(config):
        flag, value = f"{prefix}{entry.name}", getattr(config, entry.name)
        if isinstance(value, Mapping) and value:
            names, remaining = _split_flag(flag, remaining)
            changed[entry.name] = dict.fromkeys(names, next(iter(value.values()))) | dict(value)
        elif is_dataclass(value):
            changed[entry.name], remaining = split_pairs(value, remaining, f"{flag}.")
    return replace(config, **changed), remaining


def _split_flag(flag: str, arguments: list[str]) -> tuple[list[str], list[str]]:
    """The names that a flag is given, and the arguments with one flag for each of them."""
    given = [index for index, argument in enumerate(arguments) if argument.replace("-", "_") == flag.replace("-", "_")]
    if not given:
        return [], arguments
    start = given[-1]
    end = next(
        (index for index in range(start + 1, len(arguments)) if arguments[index].startswith("--")), len(arguments)
    )
    names, values = arguments[start + 1 : end : 2], arguments[start + 2 : end : 2]
    if not names or len(names) != len(values):
        raise UserError(
            f"{flag} is {' '.join(arguments[start + 1 : end])!r}: it must be NAME VALUE, once or more often."
        )
    pairs = [part for name, value in zip(names, values, strict=True) for part in (f"{flag}.{name}", value)]
    return names, [*arguments[:start], *pairs, *arguments[end:]]


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
