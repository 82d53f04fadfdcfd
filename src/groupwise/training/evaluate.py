"""A policy judged: while it trains, and by `groupwise eval` afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from groupwise.core.errors import UserError
from groupwise.dist.trackers import Trackers
from groupwise.memory.recovery import Recovery, Retry
from groupwise.training.checkpoint import check_same_files, newest_valid_checkpoint, read_meta, restore
from groupwise.training.config import Config
from groupwise.training.run_folder import RunFolder
from groupwise.training.setup import Setup, set_up
from groupwise.workloads.base import EvaluationReport


@dataclass(frozen=True)
class Evaluation:
    step: int
    metrics: Mapping[str, float]
    report: EvaluationReport | None
    """What the workload has to say besides, on the main rank."""
    pictures: Sequence[Path]
    is_main: bool


def evaluate(config: Config, folder: RunFolder, warn: Callable[[str], None]) -> Evaluation:
    """The metrics of a run's newest good checkpoint, and its workload's report."""
    path = newest_valid_checkpoint(folder.checkpoints, warn)
    if path is None:
        raise UserError(f"{folder.path} holds no checkpoint to evaluate. Train it first, or name another run folder.")
    setup = set_up(config, path)
    check_same_files(path, setup.workload.checkpoint_files())
    restore(path, setup.state)
    recovery = Recovery(setup.workload, setup.state.cut, setup.shape, warn)
    recovery.restore(read_meta(path).get("cut", {}))
    metrics = log_evaluation(setup, folder, None, f"step {setup.state.step}", again=recovery.attempt)
    report, pictures = recovery.attempt("evaluation", _report, setup, folder)
    return Evaluation(setup.state.step, metrics, report, pictures, setup.comm.is_main)


def _report(setup: Setup, folder: RunFolder) -> tuple[EvaluationReport | None, list[Path]]:
    with _evaluation_mode(setup, "report"):
        report = setup.workload.reporter.final_report() if setup.comm.is_main else None
        return report, _write_report(report, folder) if report else []


@contextmanager
def _evaluation_mode(setup: Setup, method: str) -> Iterator[None]:
    """The policy on its averaged weights where there are any; what fails is told as the workload's."""
    ema, policy = setup.state.ema, setup.state.policy
    what = f"{method}() of {type(setup.workload).__name__}"
    with setup.comm.fail_together(what), ema.borrowed(policy) if ema else nullcontext(), torch.no_grad():
        yield


def _evaluate(setup: Setup) -> dict[str, float]:
    with _evaluation_mode(setup, "evaluate"):
        return {name: float(value) for name, value in setup.workload.evaluate().items()}


def _write_report(report: EvaluationReport, folder: RunFolder) -> list[Path]:
    """Its metrics into eval.json, beside those of other moments; its pictures beside it."""
    folder.write("eval.json", {**folder.read("eval.json"), **report.metrics})
    pictures = {folder.path / name: draw for name, draw in (report.images or {}).items()}
    for path, draw in pictures.items():
        draw(path)
    return list(pictures)


def _draw(setup: Setup, folder: RunFolder, moment: str) -> None:
    with _evaluation_mode(setup, "pictures"):
        for name, draw in setup.workload.reporter.images().items() if setup.comm.is_main else ():
            draw(folder.path / f"{moment.replace(' ', '-')}-{name}")


def log_evaluation(
    setup: Setup, folder: RunFolder, trackers: Trackers | None, moment: str, *, again: Retry
) -> dict[str, float]:
    """Metrics and pictures of this moment, kept in the run folder."""
    metrics = again("evaluation", _evaluate, setup)
    if metrics and setup.comm.is_main:
        folder.write("eval.json", {**folder.read("eval.json"), moment: metrics})
    again("evaluation", _draw, setup, folder, moment)
    if trackers:
        trackers.log({f"eval/{name}": value for name, value in metrics.items()}, setup.state.step)
    return metrics
