"""What a person sees of a run on stderr: progress, samples, checks and warnings. Stdout stays free for results."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from groupwise.core.units import format_bytes
from groupwise.memory.measure import MemoryUsage
from groupwise.training.config import Config
from groupwise.training.loop import StepResult
from groupwise.training.preflight import NOTE, Check

_SHOWN_EXCESS = 0.005
"""Of measured over planned memory, as a share: less is rounding."""


class ProgressBar:
    """A live bar with the time left; a plain line for every tenth where stderr is no terminal."""

    def __init__(self, total: int, label: str, console: Console):
        self._total, self._label, self._console = total, label, console
        self._live = console.is_terminal and not console.quiet
        self._every = max(1, total // 10)
        self._completed = 0
        self._progress = Progress(
            TextColumn(label),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[details]}", markup=False),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not self._live,
        )
        self._task = self._progress.add_task(label, total=total, details="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start_at(self, completed: int) -> None:
        """Skip what was done earlier: it says nothing about the speed."""
        self._completed = completed
        self._progress.reset(self._task, completed=completed, details="")

    def advance(self, details: str = "") -> None:
        """One more is complete."""
        self._completed += 1
        self._progress.update(self._task, completed=self._completed, details=details)
        if not self._live and (self._completed in (1, self._total) or self._completed % self._every == 0):
            line = f"{self._label} {self._completed}/{self._total}  {details}".rstrip()
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)


def progress_bar(total: int, label: str) -> ProgressBar:
    """For any long work: `with progress_bar(len(settings), "setting") as bar:`, then `bar.advance()` after each."""
    return ProgressBar(total, label, Console(file=sys.stderr))


class ProgressDisplay:
    """Progress and warnings of a training run. Silent on all ranks but the first."""

    def __init__(self, config: Config, *, silent: bool):
        self.console = Console(file=sys.stderr, quiet=silent)
        self._bar = ProgressBar(config.steps, "step", self.console)
        self._rollouts = config.conditions_per_step * config.group_size
        self._samples_every = config.run.show_samples_every
        self._last = time.perf_counter()
        self._warned_last_step = False

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def start_at(self, step: int) -> None:
        """A resumed run starts at this step."""
        self._bar.start_at(step)

    def show_step(self, step: StepResult) -> None:
        now = time.perf_counter()
        rate = self._rollouts / max(now - self._last, 1e-9)
        self._last = now
        self._bar.advance(
            f"reward {step.metrics['reward']:.3f}  {rate:,.0f} rollouts/s  {describe_memory(step.memory)}"
            f"  no spread {step.metrics['zero_spread_share']:.0%}"
        )

    def show_step_details(self, step: StepResult, warning: str | None) -> None:
        """Every few steps a table of samples; a warning, unless the step before had one too."""
        if step.samples and self._samples_every and step.step % self._samples_every == 0:
            self.console.print(sample_table(step.samples))
        if warning and not self._warned_last_step:
            self.warn(f"Step {step.step + 1}: {warning}")
        self._warned_last_step = bool(warning)

    def show_checks(self, checks: Sequence[Check]) -> None:
        self.console.print(check_table(checks))

    def print(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    def warn(self, text: str) -> None:
        self.print(f"Warning: {text}", style="yellow")


def describe_memory(memory: MemoryUsage) -> str:
    """Peak, share of the device and, where there is a plan, its upper limit: few steps are the longest possible."""
    text = f"memory {format_bytes(memory.peak)} ({memory.utilization:.0%})"
    if memory.predicted is None:
        return text
    excess = memory.peak / memory.predicted - 1
    exceeded = f" (exceeded by {excess:.0%})" if excess >= _SHOWN_EXCESS else ""
    return f"{text}, planned at most {format_bytes(memory.predicted)}{exceeded}"


_COMMON_COLUMNS = ("step", "group", "member", "condition", "reward", "rewards", "advantage")


def sample_table(samples: Sequence[Mapping[str, Any]]) -> Table:
    """One row a rollout: the reporter's description, then its rewards."""
    described = [name for name in samples[0] if name not in _COMMON_COLUMNS]
    terms = list(samples[0]["rewards"])
    table = Table(title=f"Samples of step {samples[0]['step']}", title_justify="left", pad_edge=False)
    for name in described:
        table.add_column(name, overflow="fold", max_width=44)
    for name in (*terms, *(["reward"] if len(terms) > 1 else []), "advantage"):
        table.add_column(name, justify="right")
    previous: Mapping[str, Any] = {}
    for sample in samples:
        cells = [str(sample[name]) for name in described]
        if described and previous.get("group") == sample["group"] and previous[described[0]] == sample[described[0]]:
            cells[0] = ""  # members of a group share their condition
        previous = sample
        rewards = [sample["rewards"][name] for name in terms] + ([sample["reward"]] if len(terms) > 1 else [])
        numbers = ["missing" if number is None else f"{number:.3g}" for number in (*rewards, sample["advantage"])]
        table.add_row(*map(Text, cells), *numbers)
    return table


def check_table(checks: Sequence[Check]) -> Table:
    table = Table(title="Preflight", title_justify="left", box=None, show_header=False)
    for check in checks:
        mark = "[green]passed[/]" if check.passed else "[red]FAILED[/]"
        table.add_row(*(("note", "", check.detail) if check.name == NOTE else (mark, check.name, check.detail)))
    return table
