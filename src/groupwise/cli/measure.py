"""`groupwise measure MODEL`: where an answer's milliseconds go."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from groupwise.cli.arguments import parse, print_json, quiet_stdout
from groupwise.core.errors import UserError, require

if TYPE_CHECKING:
    from groupwise.latency.records import LatencySummary
    from groupwise.workloads.controller.latency.measure import MeasuredModel
    from groupwise.workloads.controller.model.knobs import Knobs

_CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
_IDLE_THRESHOLD = 0.9
_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class MeasureArguments:
    """Measure where the milliseconds of one answer go: vision, prefill, decode, by tier, depth and top-k, at batch 1.

    Vision is the time in the vision tower and its projector; prefill is all else up to the first token's scores;
    decode is the rest, n - 1 steps for n tokens. p50 is the median, p95 what 19 of 20 runs stay under, spread the
    interquartile range. The settings take turns, so that a slow spell of the machine meets all of them.

    Try: groupwise measure mosaic --runs 5
    """

    model: tyro.conf.Positional[str]
    """mosaic (embedded), or a folder of a transformers model: LLaVA with its knobs, text models as they are."""
    runs: int = 12
    """Answers that are counted, for every setting."""
    warm_up: int = 2
    """Answers before them that are not counted."""
    new_tokens: int = 4
    """Tokens of each answer. The first comes with prefill, so 1 leaves no decode: mosaic's own answers are such."""
    prompt_tokens: int = 32
    """Tokens of text in the prompt of a local model. mosaic is asked its own questions."""
    threads: int = 1
    """Threads of the processor. Small models are fastest with one."""
    clock: Literal["wall", "processor"] = "wall"
    """wall: what one waits. processor: only while this process is at work, for a busy machine without accelerator."""
    plot: Path | None = None
    """Where the picture goes: .png, .svg or .pdf. measure-MODEL.png in this folder if not named."""


def run(words: list[str], as_json: bool) -> int:
    arguments = parse(MeasureArguments, words, prog="groupwise measure")
    picture = _checked(arguments)
    from groupwise.cli.measure_view import draw, show
    from groupwise.dist.process import configure_process
    from groupwise.workloads.controller.latency.measure import load_measured_model

    configure_process(arguments.threads)
    with quiet_stdout(as_json):
        subject = load_measured_model(arguments.model, prompt_tokens=arguments.prompt_tokens)
        found, processor_share = _measure(subject, arguments)
    notes = [_machine(arguments), _describe_run(arguments), *_warning(arguments.clock, processor_share)]
    draw(found, subject.full, title=f"{_short(arguments.model)}: one answer, measured", notes=notes, path=picture)
    if as_json:
        print_json(as_plain(found, arguments) | {"notes": notes, "picture": str(picture)})
    else:
        show(found, subject.full, title=arguments.model, notes=notes)
        print(f"Picture: {picture}")
    return 0


def as_plain(found: Mapping[Knobs, LatencySummary], arguments: MeasureArguments) -> dict[str, Any]:
    """All metrics as JSON values."""
    rows = [
        {"tier": knobs.tier, "blocks": knobs.blocks, "top_k": knobs.top_k}
        | {stage: asdict(values) for stage, values in summary.stages.items()}
        | {"decode_step": asdict(summary.decode_step) if summary.decode_step else None, "total": asdict(summary.total)}
        for knobs, summary in found.items()
    ]
    return {
        "model": arguments.model,
        "machine": _machine(arguments),
        "clock": arguments.clock,
        "threads": arguments.threads,
        "new_tokens": arguments.new_tokens,
        "warm_up": arguments.warm_up,
        "runs": arguments.runs,
        "measured": rows,
    }


def _checked(arguments: MeasureArguments) -> Path:
    """Refuse before a minute is spent; else, where the picture goes."""
    for name, least in (("runs", 1), ("warm_up", 0), ("new_tokens", 1), ("prompt_tokens", 1), ("threads", 1)):
        value = getattr(arguments, name)
        require(value >= least, name, value, f"{least} or more")
    picture = arguments.plot or Path(f"measure-{_short(arguments.model)}.png")
    require(picture.suffix in _PICTURES, "plot", picture, f"a file that ends in {', '.join(_PICTURES)}")
    require(picture.parent.is_dir(), "plot", picture, "in a folder that exists")
    if arguments.clock == "processor":
        require(arguments.threads == 1, "threads", arguments.threads, "1 for the processor's clock, which adds them up")
    missing = [name for name in ("transformers", "sklearn", "matplotlib") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"groupwise measure needs {', '.join(missing)}, not installed here: pip install 'groupwise[controller]'."
        )
    return picture


def _measure(subject: MeasuredModel, arguments: MeasureArguments) -> tuple[dict[Knobs, LatencySummary], float]:
    """The metrics, with a bar on stderr meanwhile, and the share of the time in which this process was at work."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from groupwise.workloads.controller.latency.measure import measure

    console, rounds = Console(file=sys.stderr), arguments.warm_up + arguments.runs
    console.print(f"{len(subject.settings)} settings x {rounds} answers of {subject.name}", highlight=False)
    columns = (TextColumn("answer"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("measure", total=len(subject.settings) * rounds)
        begun, at_work = time.perf_counter(), time.process_time()
        found = measure(
            subject,
            warm_up=arguments.warm_up,
            runs=arguments.runs,
            new_tokens=arguments.new_tokens,
            clock=_CLOCKS[arguments.clock],
            after_answer=lambda: progress.advance(task),
        )
    return found, (time.process_time() - at_work) / (time.perf_counter() - begun)


def _machine(arguments: MeasureArguments) -> str:
    from groupwise.latency.machine import current_machine

    here = current_machine()
    device = f" with {here.device}" if here.device != "cpu" else ""
    threads = f"{here.threads} thread{'s' * (here.threads > 1)}"
    return f"{here.cpu}{device}, {threads}, torch {here.torch}, {arguments.clock} clock"


def _describe_run(arguments: MeasureArguments) -> str:
    runs, tokens = arguments.runs, arguments.new_tokens
    return (
        f"batch 1, {tokens} token{'s' * (tokens > 1)} an answer; {runs} run{'s' * (runs > 1)} of each setting after"
        f" {arguments.warm_up} of warm-up"
    )


def _warning(clock: str, processor_share: float) -> list[str]:
    """Other processes may have had the processor. With an accelerator, waiting is no sign of that."""
    import torch

    if clock == "processor" or torch.accelerator.is_available() or processor_share > _IDLE_THRESHOLD:
        return []
    return [f"The machine was busy: this process ran for {processor_share:.0%} of the time. Its times are too long."]


def _short(model: str) -> str:
    return Path(model).resolve().name if Path(model).is_dir() else model.rsplit("/", 1)[-1]
