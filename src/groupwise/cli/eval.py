"""`groupwise eval RUN`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from groupwise.cli.arguments import parse, print_json, quiet_stdout
from groupwise.cli.tables import print_table
from groupwise.core.errors import UserError
from groupwise.core.io.imports import only_named_code
from groupwise.recipes import RECIPES, load_recipe
from groupwise.rewards.config import split_name
from groupwise.training.config import Config, from_dict, to_dict
from groupwise.training.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from groupwise.training.evaluate import Evaluation


@dataclass(frozen=True)
class EvalArguments:
    """Evaluate the newest valid checkpoint of a run on held-out data, and write eval.json into the run's folder.

    The run must come from a recipe, which is loaded again; one of your own is named anew, because a run folder may
    come from somebody else, whose code is not run. Workloads with baselines compare against them; that can take some
    minutes.

    Try: groupwise eval runs/chat
    """

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """A run folder, such as runs/chat."""
    recipe: str | None = None
    """The recipe that the run was started with, where it is not built in: file.py or module:function."""
    code: tuple[str, ...] = ()
    """Functions and services named in the run's settings (rewards, placement, data) that may be used."""
    device: str | None = None
    """Where to evaluate, such as cuda or cpu. By default where the run was told to train."""


def run(arguments: list[str], as_json: bool) -> int:
    options = parse(EvalArguments, arguments, prog="groupwise eval")
    folder = RunFolder(options.run_dir)
    recipe, config = config_of_run(folder, options.recipe)
    config = replace(config, run=replace(config.run, device=options.device or config.run.device))
    from groupwise.dist.comm import disconnect
    from groupwise.training.evaluate import evaluate

    with quiet_stdout(as_json), only_named_code(_texts([to_dict(recipe), list(options.code)])):
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
    missing = "" if evaluation.metrics else ": its workload has no held-out rows"
    print(f"{folder.path} after step {evaluation.step}{missing}")
    for name, value in evaluation.metrics.items():
        print(f"  {name:<32} {value:.4f}")
    for table in evaluation.report.tables if evaluation.report else ():
        print_table(table)
    for path in evaluation.images:
        print(f"Picture: {path}")


def config_of_run(folder: RunFolder, named: str | None = None) -> tuple[Config, Config]:
    """The recipe of a run as it is, and with the settings that the run was started with.

    A recipe is code: one that only the run's config.json names is imported if it is built in, and refused otherwise.
    """
    saved = folder.read("config.json")
    if not saved:
        raise UserError(f"{folder.path} is not a run folder: it holds no config.json. Name one such as runs/chat.")
    recipe = named or saved.get("recipe")
    if not isinstance(recipe, str) or not recipe:
        raise UserError(
            f"The run in {folder.path} was started from Python, not from a recipe, so its workload cannot be built"
            " here. Call groupwise.training.evaluate.evaluate(config, ...) with its config."
        )
    if named is None and recipe not in RECIPES:
        raise UserError(
            f"The run in {folder.path} names the recipe {recipe!r}, which is not built in: it would be run with your"
            f" rights. Look at it, and if you trust it, add --recipe {recipe}"
        )
    default = load_recipe(recipe)
    try:
        return default, from_dict(default, saved)
    except UserError as error:
        raise UserError(f"{folder.path / 'config.json'} does not fit the recipe '{recipe}'. {error}") from error


def _texts(value: Any) -> Iterator[str]:
    """All texts within nested settings; of a reward `name=function` the function, too."""
    if isinstance(value, str):
        yield from (value, split_name(value)[1])
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _texts(entry)
