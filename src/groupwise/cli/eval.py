"""`groupwise eval RUN`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from groupwise.cli.arguments import parse, print_json, quiet_stdout
from groupwise.core.errors import UserError
from groupwise.recipes import load_recipe
from groupwise.training.config import Config, from_dict
from groupwise.training.run_folder import RunFolder
from groupwise.workloads.base import ReportTable

if TYPE_CHECKING:
    from groupwise.training.evaluate import Evaluation


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
    from groupwise.training.evaluate import evaluate

    with quiet_stdout(as_json):
        found = evaluate(config, folder, lambda text: print(f"Warning: {text}", file=sys.stderr))
    disconnect()
    if found.is_main and as_json:
        report = {"report": dict(found.report.metrics)} if found.report else {}
        print_json({"run_dir": str(folder.path), "step": found.step, "metrics": dict(found.metrics), **report})
    elif found.is_main:
        _show(found, folder)
    return 0


def _show(found: Evaluation, folder: RunFolder) -> None:
    print(f"{folder.path} after step {found.step}{'' if found.metrics else ': its workload has no evaluate()'}")
    for name, value in found.metrics.items():
        print(f"  {name:<32} {value:.4f}")
    for table in found.report.tables if found.report else ():
        _draw(table)
    for path in found.images:
        print(f"Picture: {path}")


def _draw(table: ReportTable) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(table.columns):
        drawn.add_column(name, justify="right" if number else "left")
    for row in table.rows:
        drawn.add_row(*row)
    console = Console(highlight=False)
    console.print(f"\n[bold]{table.title}[/bold]", drawn, sep="\n", end="")
    if table.note:
        console.print(table.note)


def config_of_run(folder: RunFolder) -> Config:
    """The config that a run was started with."""
    saved = folder.read("config.json")
    if not saved:
        raise UserError(f"{folder.path} is not a run folder: it holds no config.json. Name one such as runs/doors.")
    if not saved["recipe"]:
        raise UserError(
            f"The run in {folder.path} was started from Python, not from a recipe, so it cannot be rebuilt here. Call"
            " groupwise.training.evaluate.evaluate(config, ...) with its config."
        )
    config: Config = from_dict(load_recipe(saved["recipe"]), saved)
    return config
