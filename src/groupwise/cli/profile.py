"""`groupwise profile MODEL`: fit a latency estimator."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from groupwise.cli.arguments import parse, print_json, quiet_stdout
from groupwise.cli.tables import print_table
from groupwise.core.errors import require
from groupwise.workloads.base import ReportTable

if TYPE_CHECKING:
    from groupwise.latency.estimator import LatencyEstimator


@dataclass(frozen=True)
class ProfileArguments:
    """Measure answers in random settings for a minute, and fit the latency estimator that a controller uses.

    The estimator belongs to this model on this machine and is refused elsewhere. Its error is measured on settings and
    questions that were held out from the fit. Pass the file to training with --workload.estimator FILE.

    Try: groupwise profile mosaic --seconds 30
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """mosaic (embedded), the folder of a transformers model, or a name on the Hugging Face hub."""
    output: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: estimator-MODEL.json)")
    ] = None
    """Where to write the estimator."""
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
    for name, least in (("new_tokens", 1), ("threads", 1), ("question_tokens", 4)):
        require(getattr(options, name) >= least, name, getattr(options, name), f"{least} or more")
    require(0.5 <= options.quantile < 1, "quantile", options.quantile, "from 0.5 to below 1")
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
    metrics = _metrics(estimator, output, time.perf_counter() - start)
    if as_json:
        print_json(metrics)
    else:
        print_table(_table(metrics))
    return 0


def _metrics(estimator: LatencyEstimator, output: Path, seconds: float) -> dict[str, Any]:
    import numpy as np

    errors = np.abs(np.median(estimator.ratios) / estimator.ratios - 1)
    return {
        "estimator": str(output),
        "model": estimator.model,
        "machine": asdict(estimator.machine),
        "seconds": seconds,
        "answers": len(estimator.ratios),
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
    return ReportTable(f"{metrics['estimator']}: {metrics['model']}", ["estimator", ""], rows, note)
