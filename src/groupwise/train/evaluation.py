"""A policy judged: while it trains, and by `groupwise eval` afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from groupwise.core.errors import UserError
from groupwise.dist.trackers import Trackers
from groupwise.train.checkpoint import check_same_files, newest_good, restore
from groupwise.train.config import Config
from groupwise.train.folder import RunFolder
from groupwise.train.setup import Setup, set_up
from groupwise.workloads.report import Report


@dataclass(frozen=True)
class Evaluation:
    step: int
    figures: Mapping[str, float]
    report: Report | None
    """What the workload has to say besides, on the main rank."""
    pictures: Sequence[Path]
    is_main: bool


def evaluate(config: Config, folder: RunFolder, warn: Callable[[str], None]) -> Evaluation:
    """The figures of a run's newest good checkpoint, and its workload's report."""
    path = newest_good(folder.checkpoints, warn)
    if path is None:
        raise UserError(f"{folder.path} holds no checkpoint to evaluate. Train it first, or name another run folder.")
    setup = set_up(config, path)
    check_same_files(path, setup.workload.files())
    restore(path, setup.state)
    figures = log_evaluation(setup, folder, None, f"step {setup.state.step}")
    with _judged(setup, "report"):
        report = setup.workload.report() if setup.comm.is_main else None
        pictures = _write_report(report, folder) if report else []
    return Evaluation(setup.state.step, figures, report, pictures, setup.comm.is_main)


@contextmanager
def _judged(setup: Setup, method: str) -> Iterator[None]:
    """The policy on its averaged weights where there are any; what fails is told as the workload's."""
    ema, policy = setup.state.ema, setup.state.policy
    what = f"{method}() of {type(setup.workload).__name__}"
    with ema.borrowed(policy) if ema else nullcontext(), torch.no_grad(), setup.comm.together(what):
        yield


def _evaluate(setup: Setup) -> dict[str, float]:
    with _judged(setup, "evaluate"):
        return {name: float(value) for name, value in setup.workload.evaluate().items()}


def _write_report(report: Report, folder: RunFolder) -> list[Path]:
    """Its figures into eval.json, beside those of other moments; its pictures beside it."""
    folder.write("eval.json", {**folder.read("eval.json"), **report.figures})
    pictures = {folder.path / name: draw for name, draw in (report.pictures or {}).items()}
    for path, draw in pictures.items():
        draw(path)
    return list(pictures)


def log_evaluation(setup: Setup, folder: RunFolder, trackers: Trackers | None, moment: str) -> dict[str, float]:
    """Figures and pictures of this moment, kept in the run folder."""
    figures = _evaluate(setup)
    if figures and setup.comm.is_main:
        folder.write("eval.json", {**folder.read("eval.json"), moment: figures})
    with _judged(setup, "pictures"):
        for name, draw in setup.workload.pictures().items() if setup.comm.is_main else ():
            draw(folder.path / f"{moment.replace(' ', '-')}-{name}")
    if trackers:
        trackers.log({f"eval/{name}": value for name, value in figures.items()}, setup.state.step)
    return figures
