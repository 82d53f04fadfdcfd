"""RECIPE and its fields, as `train` and `check` take them."""

from __future__ import annotations

from groupwise.cli.output import parse
from groupwise.core.errors import UserError
from groupwise.recipes import HOW_TO_NAME, RECIPES, load_recipe
from groupwise.train.config import Config
from groupwise.workloads.base import WorkloadConfig


def read_config(command: str, words: list[str], description: str) -> Config:
    """The recipe named first, with the fields that the user changed."""
    if not words or words[0].startswith("-"):
        if "-h" in words or "--help" in words:
            _teach(command, description)
        raise UserError(f"`groupwise {command}` needs a recipe: groupwise {command} RECIPE. {HOW_TO_NAME}")
    if any(word.split("=")[0] == "--ranks" for word in words):
        raise UserError(
            "--ranks is not a field of a recipe: there are as many ranks as the launcher starts. Use `torchrun"
            f" --nproc-per-node N -m groupwise {command} ...`, or `accelerate launch` with --num-processes N."
        )
    config = load_recipe(words[0])
    return parse(Config, words[1:], prog=f"groupwise {command} {words[0]}", description=description, default=config)


def _teach(command: str, description: str) -> None:
    """Help for no recipe in particular: how to name one, and the fields that all of them have."""
    built_in = f"Built-in recipes: {', '.join(RECIPES)}.\n\n" if RECIPES else ""
    parse(
        Config,
        ["--help"],
        default=Config(WorkloadConfig()),
        prog=f"groupwise {command} RECIPE",
        description=f"{description}\n\n{HOW_TO_NAME}\n\n{built_in}"
        f"These fields every recipe has; `groupwise {command} RECIPE --help` shows its own too, with its defaults.",
    )
