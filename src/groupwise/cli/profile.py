"""`groupwise profile MODEL`: fit a latency estimator, or measure which blocks it misses least."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from groupwise.cli.arguments import parse, print_json, quiet_stdout
from groupwise.cli.tables import print_table
from groupwise.core.errors import UserError, require
from groupwise.workloads.base import ReportTable

if TYPE_CHECKING:
    from groupwise.latency.estimator import LatencyEstimator
    from groupwise.workloads.controller.evaluate.importance import ImportanceReport

_QUESTIONS_PER_PASS = 8


@dataclass(frozen=True)
class ProfileArguments:
    """Measure answers in random settings for a minute, and fit the latency estimator that a controller uses.

    The estimator belongs to this model on this machine and is refused elsewhere. Its error is measured on settings and
    questions that were held out from the fit. Pass the file to training with --workload.estimator FILE.

    With --importance it measures instead how much accuracy each block is worth on your own questions, and writes
    importance.json, from which the drop order of blocks is read when the model is loaded.

    Try: groupwise profile mosaic --seconds 30
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """mosaic (embedded), the folder of a transformers model, or a name on the Hugging Face hub."""
    output: Annotated[
        Path | None,
        tyro.conf.arg(
            metavar="FILE",
            help_behavior_hint="(default: estimator-MODEL.json, or importance.json in the model's folder)",
        ),
    ] = None
    """Where to write the result."""
    importance: bool = False
    """Measure the importance of each block instead of latency, on the questions of --data."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Questions with answers: rows, or VQA's questions file; as --workload.questions."""
    annotations: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """VQA's annotations file."""
    images: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder of the images."""
    questions: int = 256
    """Questions to ask, at most; all are of the training split."""
    accuracy: str = "exact"
    """How answers are graded: exact, vqa, or a function of your own; as --workload.rewards.functions."""
    seconds: float = 60.0
    """How long to measure."""
    new_tokens: int = 1
    """Tokens of the longest answer; shorter answers are measured too."""
    question_tokens: int = 32
    """Typical length of a question. Not used for mosaic, which has questions of its own."""
    quantile: float = 0.95
    """Share of answers that stay below the upper estimate."""
    threads: int = 1
    """CPU threads. Use as many as in training and serving."""


def run(arguments: list[str], as_json: bool) -> int:
    options = parse(ProfileArguments, arguments, prog="groupwise profile")
    for name, least in (("new_tokens", 1), ("threads", 1), ("question_tokens", 4), ("questions", 1)):
        require(getattr(options, name) >= least, name, getattr(options, name), f"{least} or more")
    require(0.5 <= options.quantile < 1, "quantile", options.quantile, "from 0.5 to below 1")
    return _importance(options, as_json) if options.importance else _estimator(options, as_json)


def _estimator(options: ProfileArguments, as_json: bool) -> int:
    output = options.output or Path(f"estimator-{Path(options.model).name}.json")
    from groupwise.dist.process import configure_process
    from groupwise.workloads.controller.latency.source import fit_estimator
    from groupwise.workloads.controller.model.load import load_model
    from groupwise.workloads.controller.serving.server import ServedTimer

    configure_process(options.threads)
    with quiet_stdout(as_json):
        start = time.perf_counter()
        estimator = fit_estimator(
            load_model(options.model, dtype="auto"),
            timer_for=ServedTimer,
            seconds=options.seconds,
            new_tokens=options.new_tokens,
            question_tokens=options.question_tokens,
            quantile=options.quantile,
        )
        estimator.save(output)
    if estimator.was_busy:
        print(
            f"Warning: the machine was busy with other programs: answers had the CPU for {estimator.cpu_share:.0%} of"
            f" their time, so the estimates in {output} are too long. Stop other programs and profile again.",
            file=sys.stderr,
        )
    metrics = _metrics(estimator, output, time.perf_counter() - start)
    if as_json:
        print_json(metrics)
    else:
        print_table(_table(metrics))
    return 0


def _importance(options: ProfileArguments, as_json: bool) -> int:
    from groupwise.core.io.files import to_json
    from groupwise.dist.process import configure_process

    output = _importance_file(options)
    configure_process(options.threads)
    with quiet_stdout(as_json):
        report = _measure_importance(options)
    content = {"drop_order": report.drop_order, **asdict(report), "data": str(options.data)}
    output.write_text(to_json(content) + "\n")
    if as_json:
        print_json({"importance": str(output), **content})
    else:
        print_table(_importance_table(report, output))
    return 0


def _measure_importance(options: ProfileArguments) -> ImportanceReport:
    from groupwise.dist.devices import default_device
    from groupwise.rewards.config import RewardFunctionsConfig
    from groupwise.training.progress import progress_bar
    from groupwise.workloads.controller.evaluate.importance import measure_importance
    from groupwise.workloads.controller.rewards import grade_questions
    from groupwise.workloads.controller.tasks.vqa.config import VqaConfig
    from groupwise.workloads.controller.tasks.vqa.task import load_for, training_questions

    config = VqaConfig(
        model=options.model,
        questions=options.data,
        annotations=options.annotations,
        images=options.images,
        train_questions=options.questions,
        rewards=RewardFunctionsConfig(functions=(options.accuracy,)),
    )
    loaded = load_for(config, default_device())
    questions = training_questions(config, loaded)
    passes = math.ceil(len(questions) / _QUESTIONS_PER_PASS)
    with progress_bar(passes, f"{len(questions)} questions to {options.model}") as bar:
        return measure_importance(
            loaded,
            questions,
            grade_questions(config.rewards),
            max_new_tokens=config.max_new_tokens,
            rows_per_pass=_QUESTIONS_PER_PASS,
            after_pass=bar.advance,
        )


def _importance_table(report: ImportanceReport, output: Path) -> ReportTable:
    rows = [[str(row.block), f"{row.accuracy_lost:+.3f}", f"{row.divergence:.3f}"] for row in report.blocks]
    note = (
        f"Of {report.questions} questions at tier {report.tier}, {report.accuracy:.3f} right with all blocks. Each"
        " block was dropped alone; the first one always runs. Loading the model reads the order from importance.json."
    )
    return ReportTable(
        f"{output}: the least important block first", ["block", "accuracy lost", "divergence"], rows, note
    )


def _importance_file(options: ProfileArguments) -> Path:
    for name in ("data", "images"):
        if getattr(options, name) is None:
            raise UserError(
                f"--{name} is not given: --importance asks the model your own questions. Give --data FILE, --images"
                " FOLDER and, for VQA's own format, --annotations FILE."
            )
    folder = Path(options.model)
    if options.output is None and not folder.is_dir():
        raise UserError(f"{options.model!r} is not a folder to write importance.json into. Name a file with --output.")
    output = options.output or folder / "importance.json"
    if not os.access(output.parent, os.W_OK):
        raise UserError(
            f"{output} cannot be written: there is no such folder, or it is read-only. Name another --output."
        )
    return output


def _metrics(estimator: LatencyEstimator, output: Path, seconds: float) -> dict[str, Any]:
    import numpy as np

    errors = np.abs(np.median(estimator.ratios) / estimator.ratios - 1)
    return {
        "estimator": str(output),
        "model": estimator.model,
        "machine": asdict(estimator.machine),
        "seconds": seconds,
        "answers": len(estimator.ratios),
        "cpu_share": estimator.cpu_share,
        "was_busy": estimator.was_busy,
        "median_error": float(np.median(errors)),
        "quantile": estimator.quantile,
    }


def _table(metrics: dict[str, Any]) -> ReportTable:
    rows = [
        ["answers measured", str(metrics["answers"])],
        ["seconds", f"{metrics['seconds']:.0f}"],
        ["median error on held-out settings and questions", f"{metrics['median_error']:.1%}"],
        ["share of answers below the upper estimate", f"{metrics['quantile']:.0%}"],
    ]
    note = "The error is that of single answers, so it includes the noise of the clock."
    if metrics["cpu_share"] is not None:
        rows.insert(2, ["share of their time in which they had the CPU", f"{metrics['cpu_share']:.0%}"])
    return ReportTable(f"{metrics['estimator']}: {metrics['model']}", ["estimator", ""], rows, note)
