"""`groupwise eval RUN`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from groupwise.cli.arguments import parse, print_json, quiet_stdout
from groupwise.cli.tables import print_table
from groupwise.core.errors import UserError
from groupwise.recipes import load_recipe
from groupwise.training.config import Config, from_dict
from groupwise.training.run_folder import RunFolder

if TYPE_CHECKING:
    from groupwise.training.evaluate import Evaluation


@dataclass(frozen=True)
class EvalArguments:
    """Evaluate the newest valid checkpoint of a run on held-out data, and write eval.json into the run's folder.

    The run must come from a recipe, which is loaded again. Workloads with baselines compare against them; that can
    take some minutes.

    Try: groupwise eval runs/chat
    """

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """A run folder, such as runs/chat."""


def run(arguments: list[str], as_json: bool) -> int:
    folder = RunFolder(parse(EvalArguments, arguments, prog="groupwise eval").run_dir)
    config = config_of_run(folder)
    from groupwise.dist.comm import disconnect
    from groupwise.training.evaluate import evaluate

    with quiet_stdout(as_json):
        evaluation = evaluate(config, folder, lambda text: print(f"Warning: {text}", file=sys.stderr))
    disconnect()
    if evaluation.is_main and as_json:
        report = {"report": dict(evaluation.report.metrics)} if evaluation.report else {}
        metrics = dict(evaluation.metrics)
        print_json({"run_dir": str(folder.path), "step": evaluation.step, "metrics": metrics, **report})
    elif evaluation.is_main:
        _show(evaluation, folder)
    return 0


def _show(evaluation: Evaluation, folder: RunFolder) -> None:
    missing = "" if evaluation.metrics else ": its workload has no evaluate()"
    print(f"{folder.path} after step {evaluation.step}{missing}")
    for name, value in evaluation.metrics.items():
        print(f"  {name:<32} {value:.4f}")
    for table in evaluation.report.tables if evaluation.report else ():
        print_table(table)
    for path in evaluation.images:
        print(f"Picture: {path}")


def config_of_run(folder: RunFolder) -> Config:
    """The config that a run was started with."""
    saved = folder.read("config.json")
    if not saved:
        raise UserError(f"{folder.path} is not a run folder: it holds no config.json. Name one such as runs/chat.")
    if not saved["recipe"]:
        raise UserError(
            f"The run in {folder.path} was started from Python, not from a recipe, so its workload cannot be built"
            " here. Call groupwise.training.evaluate.evaluate(config, ...) with its config."
        )
    config: Config = from_dict(load_recipe(saved["recipe"]), saved)
    return config
