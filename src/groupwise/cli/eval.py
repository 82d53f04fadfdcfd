"""`groupwise eval RUN`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from groupwise.cli.main import print_json
from groupwise.core.errors import UserError
from groupwise.recipes import load_recipe
from groupwise.train.config import Config, with_values
from groupwise.train.folder import RunFolder


@dataclass(frozen=True)
class EvalArguments:
    """Evaluate the newest good checkpoint of a run on held-out data, and write eval.json into its folder."""

    run_dir: tyro.conf.Positional[Path]
    """A run folder, such as runs/doors."""


def run(words: list[str], as_json: bool) -> int:
    arguments = tyro.cli(EvalArguments, args=words, prog="groupwise eval")
    folder = RunFolder(arguments.run_dir)
    config = config_of_run(folder)
    from groupwise.train.run import evaluate

    step, figures = evaluate(config, folder, lambda text: print(f"Warning: {text}", file=sys.stderr))
    if as_json:
        print_json({"run_dir": str(folder.path), "step": step, "figures": figures})
    else:
        print(f"{folder.path} after step {step}")
        for name, value in figures.items():
            print(f"  {name:<32} {value:.4f}")
    return 0


def config_of_run(folder: RunFolder) -> Config:
    """The config that a run was started with."""
    saved = folder.read("config.json")
    if not saved:
        raise UserError(f"{folder.path} is not a run folder: it holds no config.json. Name one such as runs/doors.")
    if not saved["recipe"]:
        raise UserError(
            f"The run in {folder.path} was started from Python, not from a recipe, so it cannot be rebuilt here. Call"
            " groupwise.train.run.evaluate(config, ...) with its config."
        )
    config: Config = with_values(load_recipe(saved["recipe"]), saved)
    return config
