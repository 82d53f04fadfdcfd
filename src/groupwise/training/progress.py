"""What a person sees while a run goes on: on stderr, so that stdout stays free for results."""

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
from groupwise.training.loop import StepResult
from groupwise.training.preflight import Check


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
    """A live progress line in a terminal; a plain line now and then elsewhere. Silent on all ranks but the first."""

    def __init__(self, *, steps: int, rollouts_per_step: int, silent: bool):
        self.console = Console(file=sys.stderr, quiet=silent)
        self._steps, self._rollouts = steps, rollouts_per_step
        self._live = not silent and self.console.is_terminal
        self._every = max(1, steps // 10)
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self.console,
            disable=not self._live,
        )
        self._task = self._progress.add_task("train", total=steps, metrics="")
        self._last = time.perf_counter()
        self._alarmed = False

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, step: int, metrics: Mapping[str, float], memory: MemoryUsage) -> None:
        now = time.perf_counter()
        rate = self._rollouts / max(now - self._last, 1e-9)
        self._last = now
        line = (
            f"reward {metrics['reward']:.3f}  {rate:,.0f} rollouts/s  {_memory(memory)}"
            f"  no spread {metrics['zero_spread_share']:.0%}"
        )
        self._progress.update(self._task, completed=step + 1, metrics=line)
        if not self._live and ((step + 1) % self._every == 0 or step in (0, self._steps - 1)):
            self.say(f"step {step + 1}/{self._steps}  {line}")

    def look(self, step: StepResult, alarm: str | None, *, samples_every: int) -> None:
        """Now and then what the step's first rollouts were; an alarm, unless the step before had one too."""
        if step.samples and samples_every and step.step % samples_every == 0:
            self.console.print(sample_table(step.samples))
        if alarm and not self._alarmed:
            self.warn(f"Step {step.step + 1}: {alarm}")
        self._alarmed = bool(alarm)

    def begin_at(self, step: int) -> None:
        """A resumed run has some steps behind it, which say nothing about its speed."""
        self._progress.reset(self._task, completed=step, metrics="")

    def say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    def warn(self, text: str) -> None:
        self.say(f"Warning: {text}", style="yellow")

    def checks(self, checks: Sequence[Check]) -> None:
        self.console.print(check_table(checks))


def _memory(memory: MemoryUsage) -> str:
    """Peak, share of the device and, where there is one, how far the plan was off."""
    text = f"memory {format_bytes(memory.peak)} ({memory.utilization:.0%})"
    return (
        text if memory.error is None else f"{text}, planned {format_bytes(memory.predicted or 0)} ({memory.error:+.0%})"
    )


_NUMBERED = ("step", "group", "member", "condition", "reward", "rewards", "advantage")


def sample_table(samples: Sequence[Mapping[str, Any]]) -> Table:
    """One line a rollout: what the workload's describe() says of it, then its rewards."""
    told = [name for name in samples[0] if name not in _NUMBERED]
    terms = list(samples[0]["rewards"])
    table = Table(title=f"Samples of step {samples[0]['step']}", title_justify="left", pad_edge=False)
    for name in told:
        table.add_column(name, overflow="fold", max_width=44)
    for name in (*terms, *(["reward"] if len(terms) > 1 else []), "advantage"):
        table.add_column(name, justify="right")
    above: Mapping[str, Any] = {}
    for sample in samples:
        cells = [str(sample[name]) for name in told]
        if told and above.get("group") == sample["group"] and above[told[0]] == sample[told[0]]:
            cells[0] = ""  # siblings share what was asked
        above = sample
        earned = [sample["rewards"][name] for name in terms] + ([sample["reward"]] if len(terms) > 1 else [])
        table.add_row(
            *map(Text, cells),
            *("missing" if number is None else f"{number:.3g}" for number in (*earned, sample["advantage"])),
        )
    return table


def check_table(checks: Sequence[Check]) -> Table:
    table = Table(title="Preflight", title_justify="left", box=None, show_header=False)
    for check in checks:
        mark = "[green]passed[/]" if check.passed else "[red]FAILED[/]"
        table.add_row(mark, check.name, check.detail)
    return table
