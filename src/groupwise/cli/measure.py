"""`groupwise measure MODEL`: latency of one answer by stage."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from groupwise.cli.arguments import parse, print_json, quiet_stdout
from groupwise.core.errors import UserError, require

if TYPE_CHECKING:
    from groupwise.latency.records import LatencySummary
    from groupwise.workloads.controller.latency.measure import MeasuredModel
    from groupwise.workloads.controller.model.knobs import Knobs

_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_IMAGE_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class MeasureArguments:
    """Measure the latency of one answer by stage (vision, prefill, decode), for each tier, depth and top-k, at batch 1.

    Vision is the time in the vision tower and its projector; prefill is all other time up to the logits of the first
    token; decode is the rest, n - 1 steps for n tokens. p50 is the median, p95 the 95th percentile, IQR the
    interquartile range over the runs. Settings are interleaved, so slowdowns of the machine affect all of them equally.

    Try: groupwise measure mosaic --runs 5
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """mosaic (embedded), or the folder of a transformers model: a text model has only one setting."""
    runs: int = 12
    """Measured answers of each setting."""
    warm_up: int = 2
    """Answers of each setting before them, which are not counted."""
    new_tokens: int = 4
    """Tokens of each answer. The first one belongs to prefill, so 1 has no decode."""
    prompt_tokens: int = 32
    """Text tokens of the prompt. Not used for mosaic, which has questions of its own."""
    threads: int = 1
    """CPU threads. Small models are fastest with one."""
    clock: Literal["wall", "cpu"] = "wall"
    """wall: elapsed time. cpu: CPU time of this process, for a busy machine without an accelerator."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: measure-MODEL.png)")] = (
        None
    )
    """Where to write the chart: .png, .svg or .pdf."""


def run(arguments: list[str], as_json: bool) -> int:
    options = parse(MeasureArguments, arguments, prog="groupwise measure")
    chart = _check(options)
    from groupwise.cli.measure_view import draw, show
    from groupwise.dist.process import configure_process
    from groupwise.workloads.controller.latency.measure import load_measured_model

    configure_process(options.threads)
    with quiet_stdout(as_json):
        model = load_measured_model(options.model, prompt_tokens=options.prompt_tokens)
        summaries = _measure(model, options)
    notes = [_describe_machine(options), _describe_run(options), *_busy_warning(summaries, options.clock)]
    draw(summaries, model.full, title=f"{_short_name(options.model)}: one answer, measured", notes=notes, path=chart)
    if as_json:
        print_json(to_dict(summaries, options) | {"notes": notes, "picture": str(chart)})
    else:
        show(summaries, model.full, title=options.model, notes=notes)
        print(f"Picture: {chart}")
    return 0


def to_dict(summaries: Mapping[Knobs, LatencySummary], options: MeasureArguments) -> dict[str, Any]:
    """All measurements as JSON values."""
    rows = [
        {"tier": knobs.tier, "blocks": knobs.blocks, "top_k": knobs.top_k}
        | {stage: asdict(quantiles) for stage, quantiles in summary.stages.items()}
        | {"decode_step": asdict(summary.decode_step) if summary.decode_step else None, "total": asdict(summary.total)}
        for knobs, summary in summaries.items()
    ]
    return {
        "model": options.model,
        "machine": _describe_machine(options),
        "clock": options.clock,
        "threads": options.threads,
        "new_tokens": options.new_tokens,
        "warm_up": options.warm_up,
        "runs": options.runs,
        "measured": rows,
    }


def _check(options: MeasureArguments) -> Path:
    """Refuse bad options before measuring; return the path of the chart."""
    for name, least in (("runs", 1), ("warm_up", 0), ("new_tokens", 1), ("prompt_tokens", 1), ("threads", 1)):
        value = getattr(options, name)
        require(value >= least, name, value, f"{least} or more")
    chart = options.plot or Path(f"measure-{_short_name(options.model)}.png")
    require(chart.suffix in _IMAGE_SUFFIXES, "plot", chart, f"a file that ends in {', '.join(_IMAGE_SUFFIXES)}")
    require(chart.parent.is_dir(), "plot", chart, "in a folder that exists")
    if options.clock == "cpu":
        require(options.threads == 1, "threads", options.threads, "1 with --clock cpu, which adds up all threads")
    missing = [name for name in ("transformers", "sklearn", "matplotlib") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"groupwise measure needs {', '.join(missing)}, not installed: pip install 'groupwise[controller]'."
        )
    return chart


def _measure(model: MeasuredModel, options: MeasureArguments) -> dict[Knobs, LatencySummary]:
    from groupwise.training.progress import progress_bar
    from groupwise.workloads.controller.latency.measure import measure

    rounds = options.warm_up + options.runs
    label = f"{len(model.settings)} settings x {rounds} answers of {model.name}"
    with progress_bar(len(model.settings) * rounds, label) as bar:
        return measure(
            model,
            warm_up=options.warm_up,
            runs=options.runs,
            new_tokens=options.new_tokens,
            clock=_CLOCKS[options.clock],
            after_answer=bar.advance,
        )


def _describe_machine(options: MeasureArguments) -> str:
    from groupwise.latency.machine import current_machine

    machine = current_machine()
    device = f" with {machine.device}" if machine.device != "cpu" else ""
    threads = f"{machine.threads} thread{'s' * (machine.threads > 1)}"
    return f"{machine.cpu}{device}, {threads}, torch {machine.torch}, {options.clock} clock"


def _describe_run(options: MeasureArguments) -> str:
    runs, tokens = options.runs, options.new_tokens
    return (
        f"batch 1, {tokens} token{'s' * (tokens > 1)} per answer; {runs} run{'s' * (runs > 1)} of each setting after"
        f" {options.warm_up} of warm-up"
    )


def _busy_warning(summaries: Mapping[Knobs, LatencySummary], clock: str) -> list[str]:
    """Of the setting from which other programs took the middle share."""
    from groupwise.latency.busy import is_busy

    known = [summary.cpu_share for summary in summaries.values() if summary.cpu_share is not None]
    if clock == "cpu" or not known or not is_busy(median(known)):
        return []
    return [
        f"The machine was busy: answers had the CPU for {median(known):.0%} of their time, so these latencies are too"
        " long. Stop other processes, or use --clock cpu."
    ]


def _short_name(model: str) -> str:
    return Path(model).resolve().name if Path(model).is_dir() else model.rsplit("/", 1)[-1]
