"""Train the controller on several seeds and with several losses, and evaluate each.

    clipped   group-relative advantages and the clipped surrogate, as the recipe has it
    ranking   pairwise ranking inside a group, without the compute cost, which would count as much as accuracy
    exact     gradient of the exact expected reward over all configurations: the upper reference, nothing is sampled

All three take the same steps over as many conditions, with the recipe's learning rate and entropy bonus; the exact one
without warm-up. Accuracy is of all test questions; the clipped runs are also timed and leave their evaluation in the
run folder.

python bench/controller.py --folder runs/bench-controller
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

import groupwise as gw
from groupwise.recipes import load_recipe
from groupwise.training.evaluate import evaluate
from groupwise.training.run_folder.folder import RunFolder
from groupwise.training.setup import Setup, set_up
from groupwise.workloads.controller.evaluate.baselines import (
    choose,
    controller_choices,
    no_group,
    per_question_oracle,
    question_type,
    table_scores,
)
from groupwise.workloads.controller.evaluate.exact import build_evaluation_set, reward_of_configurations
from groupwise.workloads.controller.workload import ControllerWorkload

LOSSES = ("clipped", "ranking", "exact")
_CONSOLE = Console(soft_wrap=True, highlight=False)


def main(folder: Path = Path("runs/bench-controller"), steps: int = 1000, seeds: int = 3, timed: bool = True) -> None:
    """Print a line a run and a summary a loss.

    Args:
        folder: Where the runs are kept; an older bench there is deleted.
        steps: Of each run.
        seeds: Runs of each loss.
        timed: Measure latency of the clipped runs too.
    """
    shutil.rmtree(folder, ignore_errors=True)
    grade: Callable[[ControllerWorkload], dict[str, float]] | None = None
    results: dict[str, list[dict[str, Any]]] = {loss: [] for loss in LOSSES}
    for seed in range(seeds):
        for loss in LOSSES:
            config = _config(folder / f"{loss}-{seed}", loss, steps, seed)
            workload = _trained_exactly(config) if loss == "exact" else _trained(config)
            grade = grade or _grader(workload)
            metrics: dict[str, Any] = grade(workload)
            if timed and loss == "clipped":
                metrics |= _timed(config)
            results[loss].append(metrics)
            _CONSOLE.print(f"{loss}, seed {seed}: {_line(metrics)}")
    _summary(results)


def _config(run_dir: Path, loss: str, steps: int, seed: int) -> gw.Config:
    config = load_recipe("controller")
    kind = config.loss.kind if loss == "exact" else loss
    return replace(
        config,
        workload=replace(config.workload, policy_seed=seed),
        steps=steps,
        seed=seed,
        loss=replace(config.loss, kind=kind),
        reward=replace(config.reward, weights={"compute_cost": 0.0}) if loss == "ranking" else config.reward,
        run=replace(config.run, run_dir=run_dir),
    )


def _trained(config: gw.Config) -> ControllerWorkload:
    gw.train(config)
    setup = _restored(config)
    assert isinstance(setup.workload, ControllerWorkload)
    return setup.workload


def _restored(config: gw.Config) -> Setup:
    from groupwise.training.run_folder.checkpoint import restore
    from groupwise.workloads.checkpoint_files import newest_valid_checkpoint

    setup = set_up(config)
    assert config.run.run_dir is not None
    path = newest_valid_checkpoint(RunFolder(config.run.run_dir).checkpoints, _CONSOLE.print)
    assert path is not None
    restore(path, setup.state)
    return setup


def _trained_exactly(config: gw.Config) -> ControllerWorkload:
    """The same steps on the gradient of the exact expected reward."""
    workload = set_up(config).workload
    assert isinstance(workload, ControllerWorkload)
    training = workload.training
    rewards = reward_of_configurations(workload, training, torch.arange(len(training)), config.reward.weights)
    optimizer = torch.optim.AdamW(workload.policy.parameters(), lr=config.optimizer.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * step / config.steps)) / 2
    )
    source = torch.Generator().manual_seed(config.seed)
    for step in range(config.steps):
        rows = torch.randperm(len(training), generator=source)[: config.conditions_per_step]
        logp = workload.controller.configuration_logp(training, rows)
        reward = (logp.exp() * rewards[rows].to(logp)).flatten(1).sum(1).mean()
        entropy = -(logp.exp() * logp).flatten(1).sum(1).mean()
        optimizer.zero_grad()
        (-reward - config.loss.entropy_at(step / config.steps) * entropy).backward()
        torch.nn.utils.clip_grad_norm_(workload.policy.parameters(), config.optimizer.max_grad_norm or math.inf)
        optimizer.step()
        schedule.step()
    return workload


def _grader(workload: ControllerWorkload) -> Callable[[ControllerWorkload], dict[str, float]]:
    """Accuracy on the test questions, between that of the lookup table and the oracles; made once for all runs."""
    task = workload.task
    assert task.selection_questions is not None
    assert task.test_questions is not None
    selection_set = build_evaluation_set(workload, task.selection_questions())
    test_set = build_evaluation_set(workload, task.test_questions())
    table, by_type, by_question = (
        float(test_set.accuracy_of(choices).nanmean())
        for choices in (
            choose(table_scores(selection_set, test_set, no_group), test_set),
            choose(table_scores(selection_set, test_set, question_type), test_set),
            per_question_oracle(test_set),
        )
    )
    _CONSOLE.print(
        f"lookup table {table:.4f}, question-type oracle {by_type:.4f}, per-question oracle {by_question:.4f} on"
        f" {len(test_set.questions)} test questions x {test_set.num_budgets} budgets"
    )

    def grade(trained: ControllerWorkload) -> dict[str, float]:
        accuracy = float(test_set.accuracy_of(controller_choices(trained.controller, test_set)).nanmean())
        return {
            "accuracy": accuracy,
            "gap_closed": _gap_closed(table, accuracy, by_type),
            "gap_closed_per_question": _gap_closed(table, accuracy, by_question),
        }

    return grade


def _gap_closed(floor: float, reached: float, ceiling: float) -> float:
    return (reached - floor) / (ceiling - floor) if ceiling > floor else math.nan


def _timed(config: gw.Config) -> dict[str, Any]:
    assert config.run.run_dir is not None
    evaluated = evaluate(config, RunFolder(config.run.run_dir), _CONSOLE.print)
    assert evaluated.report is not None
    metrics = evaluated.report.metrics
    return {
        "violation_rate": metrics["violations"]["controller"]["rate"],
        "controller_share": metrics["controller_overhead"]["share_of_answer"],
    }


def _line(metrics: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())


def _summary(results: dict[str, list[dict[str, Any]]]) -> None:
    table = Table(title="Mean over seeds (lowest to highest)", title_justify="left")
    names = list(dict.fromkeys(name for runs in results.values() for name in runs[0]))
    for name in ("loss", *(name.replace("_", " ") for name in names)):
        table.add_column(name)
    for loss, runs in results.items():
        cells = []
        for name in names:
            values = [run[name] for run in runs if name in run]
            cells.append(f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})" if values else "")
        table.add_row(loss, *cells)
    _CONSOLE.print(table)


if __name__ == "__main__":
    tyro.cli(main)
