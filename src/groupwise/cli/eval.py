"""`groupwise eval RUN`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from groupwise.cli.output import parse, print_json, quiet_stdout
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
    arguments = parse(EvalArguments, words, prog="groupwise eval")
    folder = RunFolder(arguments.run_dir)
    config = config_of_run(folder)
    from groupwise.dist.comm import disconnect
    from groupwise.train.run import evaluate

    with quiet_stdout(as_json):
        found = evaluate(config, folder, lambda text: print(f"Warning: {text}", file=sys.stderr))
    disconnect()
    if found.is_main and as_json:
        print_json({"run_dir": str(folder.path), "step": found.step, "figures": dict(found.figures)})
    elif found.is_main:
        print(f"{folder.path} after step {found.step}{'' if found.figures else ': its workload has no evaluate()'}")
        for name, value in found.figures.items():
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
