"""Evaluation of a policy: during training, and by `groupwise eval` afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from groupwise.core.errors import UserError
from groupwise.dist.comm import connect
from groupwise.dist.sharding import rollout_weights
from groupwise.training.config import Config
from groupwise.training.run_folder.checkpoint import check_same_files, restore
from groupwise.training.run_folder.folder import RunFolder
from groupwise.training.setup import Setup, set_up
from groupwise.workloads.base import EvaluationReport
from groupwise.workloads.checkpoint_files import newest_valid_checkpoint, read_metadata


@dataclass(frozen=True)
class Evaluation:
    step: int
    metrics: Mapping[str, float]
    report: EvaluationReport | None
    """The reporter's final report, on the main rank."""
    images: Sequence[Path]
    is_main: bool


def evaluate(config: Config, folder: RunFolder, warn: Callable[[str], None]) -> Evaluation:
    """The metrics of a run's newest valid checkpoint, and its workload's report."""
    path = newest_valid_checkpoint(folder.checkpoints, warn)
    if path is None:
        raise UserError(f"{folder.path} holds no checkpoint to evaluate. Train it first, or name another run folder.")
    if connect().ranks == 1:
        config = replace(config, shard="none")
    setup = set_up(config, path, warn=warn)
    check_same_files(path, setup.workload.checkpoint_files())
    restore(path, setup.state)
    setup.recovery.restore(read_metadata(path)["row_limits"])
    metrics, _ = write_evaluation(setup, folder, f"step {setup.state.step}")
    report, images = setup.recovery.retry_smaller("evaluation", _write_report, setup, folder)
    return Evaluation(setup.state.step, metrics, report, images, setup.comm.is_main)


def write_evaluation(setup: Setup, folder: RunFolder, moment: str) -> tuple[dict[str, float], list[Path]]:
    """Evaluate now; metrics go to eval.json under this moment, images beside it (on the main rank)."""
    retry = setup.recovery.retry_smaller
    metrics = retry("evaluation", held_out_metrics, setup)
    if metrics and setup.comm.is_main:
        folder.write("eval.json", {**folder.read("eval.json"), moment: metrics})
    return metrics, retry("evaluation", _write_images, setup, folder, moment)


def held_out_metrics(setup: Setup) -> dict[str, float]:
    """Of the current policy, or of its EMA weights: each rank evaluates its part of the held-out rows."""
    workload, comm = setup.workload, setup.comm
    rows = torch.arange(workload.num_held_out).tensor_split(comm.ranks)[comm.rank]
    with _evaluation_mode(setup, f"evaluate() of {type(workload).__name__}"):
        own = {name: column.cpu() for name, column in (workload.evaluate(rows) if len(rows) else {}).items()}
        _check_columns(own, len(rows))
    parts = [columns for columns in comm.gather_objects([own]) if columns]
    columns = {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
    with comm.fail_together(f"summarize_evaluation() of {type(workload).__name__}"):
        metrics = workload.summarize_evaluation(columns) if columns else {}
    return {name: float(value) for name, value in metrics.items()}


def _check_columns(columns: Mapping[str, torch.Tensor], rows: int) -> None:
    for name, column in columns.items():
        if column.shape[:1] != (rows,):
            raise UserError(
                f"evaluate() returned '{name}' of shape {tuple(column.shape)} for {rows} held-out rows: its first axis"
                " must have one entry a row."
            )


def _write_images(setup: Setup, folder: RunFolder, moment: str) -> list[Path]:
    reporter = setup.workload.reporter
    with _evaluation_mode(setup, f"images() of {type(reporter).__name__}"):
        images = reporter.images() if setup.comm.is_main else {}
        paths = {folder.path / f"{moment.replace(' ', '-')}-{name}": draw for name, draw in images.items()}
        for path, draw in paths.items():
            draw(path)
        return list(paths)


def _write_report(setup: Setup, folder: RunFolder) -> tuple[EvaluationReport | None, list[Path]]:
    """The final report: its metrics go to eval.json, its images beside it."""
    reporter = setup.workload.reporter
    with _evaluation_mode(setup, f"final_report() of {type(reporter).__name__}"):
        report = reporter.final_report() if setup.comm.is_main else None
        if report is None:
            return None, []
        folder.write("eval.json", {**folder.read("eval.json"), **report.metrics})
        images = {folder.path / name: draw for name, draw in (report.images or {}).items()}
        for path, draw in images.items():
            draw(path)
        return report, list(images)


@contextmanager
def _evaluation_mode(setup: Setup, what: str) -> Iterator[None]:
    """Without gradients, on the EMA weights where there are any; an error on one rank is raised on all."""
    ema, policy = setup.state.ema, setup.state.policy
    averaged = ema.swapped_in(policy) if ema else nullcontext()
    with setup.comm.fail_together(what), averaged, torch.no_grad(), rollout_weights(policy):
        yield
