"""`groupwise profile MODEL`: learn what an answer will take, before it runs."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from groupwise.cli.arguments import parse, print_json, quiet_stdout
from groupwise.core.errors import require

if TYPE_CHECKING:
    from groupwise.latency.estimator import LatencyEstimator


@dataclass(frozen=True)
class ProfileArguments:
    """Measure answers in random settings for a minute, and fit the estimator that training and serving ask.

    It knows its model and this machine, and is refused for others. Its error is told on settings and questions that the
    fit has not seen.

    Try: groupwise profile mosaic --seconds 30
    """

    model: tyro.conf.Positional[str]
    """mosaic (embedded), a folder of a transformers model, or a name on the hub."""
    output: Path | None = None
    """Where the estimator goes. estimator-MODEL.json in this folder if not named."""
    seconds: float = 60.0
    """How long to measure."""
    new_tokens: int = 1
    """Tokens of the longest answer; shorter ones are measured too."""
    question_tokens: int = 32
    """About how long the questions to a local model are. mosaic is asked its own."""
    quantile: float = 0.95
    """How sure the high estimate is: this share of single answers stays under it."""
    threads: int = 1
    """Threads of the processor, as they will be used later."""


def run(words: list[str], as_json: bool) -> int:
    arguments = parse(ProfileArguments, words, prog="groupwise profile")
    for name, least in (("new_tokens", 1), ("threads", 1), ("question_tokens", 4)):
        require(getattr(arguments, name) >= least, name, getattr(arguments, name), f"{least} or more")
    require(0.5 <= arguments.quantile < 1, "quantile", arguments.quantile, "from 0.5 to below 1")
    output = arguments.output or Path(f"estimator-{Path(arguments.model).name}.json")
    from groupwise.dist.process import configure_process
    from groupwise.workloads.controller.latency.source import fit_estimator
    from groupwise.workloads.controller.model.load import load_model
    from groupwise.workloads.controller.serving.server import ServedTimer

    configure_process(arguments.threads)
    with quiet_stdout(as_json):
        begun = time.perf_counter()
        estimator = fit_estimator(
            load_model(arguments.model, dtype="auto"),
            timer_for=ServedTimer,
            seconds=arguments.seconds,
            new_tokens=arguments.new_tokens,
            question_tokens=arguments.question_tokens,
            quantile=arguments.quantile,
        )
        estimator.save(output)
        metrics = _metrics(estimator, output, time.perf_counter() - begun)
    if as_json:
        print_json(metrics)
    else:
        _show(metrics)
    return 0


def _metrics(estimator: LatencyEstimator, output: Path, seconds: float) -> dict[str, Any]:
    import numpy as np

    off = np.abs(np.median(estimator.ratios) / estimator.ratios - 1)
    return {
        "estimator": str(output),
        "model": estimator.model,
        "machine": asdict(estimator.machine),
        "seconds": seconds,
        "answers": len(estimator.ratios),
        "median_error": float(np.median(off)),
        "quantile": estimator.quantile,
    }


def _show(metrics: dict[str, Any]) -> None:
    print(f"{metrics['estimator']}: {metrics['model']}")
    print(
        f"{metrics['answers']} answers measured in {metrics['seconds']:.0f} s; estimates of settings and questions not"
        f" seen are off by {metrics['median_error']:.1%} in the median, the clock's own noise included"
    )
    print(f"high estimates: {metrics['quantile']:.0%} of single answers stay under them")
