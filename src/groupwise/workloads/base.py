"""The protocol between the loop and what it trains. Torch is named here but not imported: configs stay light.
What a workload has to say about a finished run. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from groupwise.core.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from groupwise.core.placement import Rows
    from groupwise.core.types import Rollouts, Scored, Terms
    from groupwise.memory.plan import MemoryModel
    from groupwise.memory.stages import Job


class Workload(Protocol):
    """Anything that makes a row of decisions. Subclass it; the first three methods are all that must be written."""

    policy: nn.Module
    """What is trained: its parameters that require a gradient. In float32 or float64 as you like."""
    conditions: int
    """Size of the dataset."""
    stage_rows: Mapping[str, int] = {}
    """Rows taken at a time in a stage ('rollout', 'reward', 'update', 'evaluation') for which the workload has a knob
    of its own, such as decode_rows: set it in __init__, read it on every call. Replaced by half when memory runs out
    there, down to 1; after that fewer groups come to `rewards`, or fewer rows a pass to the others."""
    shrinkable: Mapping[str, int] = {}
    """Sizes that change the result, such as the longest completion: set and read likewise. Replaced by half when memory
    runs out at one row, but only those that the user allowed by name (--may-shrink)."""

    def rollout(self, rows: Rows) -> Rollouts:
        """Try each row's condition once, without gradient, taking random numbers from `rows` only.

        The rows come back in the same order. A row's outcome must not depend on its neighbours; `rows.passes()` cuts
        them where memory matters.
        """
        ...

    def rewards(self, rollouts: Rollouts) -> Terms:
        """Judge the rollouts: one number a row for every named term, NaN where there is none.

        A row's rewards may depend on its siblings, never on others: when memory runs out, fewer groups come at a time.
        """
        ...

    def score(self, rollouts: Rollouts) -> Scored:
        """Log-probabilities of the same decisions under the present policy, with gradient."""
        ...

    def passes(self, rollouts: Rollouts, rows_per_pass: int) -> Iterable[Tensor]:
        """Numbers of the rows that `score` gets together, pass after pass; at most `rows_per_pass` of them at a time.

        The rows are those of this rank that are trained. Cutting and order are a matter of memory and speed only.
        """
        import torch

        return torch.arange(len(rollouts)).split(rows_per_pass)

    def evaluate(self) -> Mapping[str, float]:
        """Named figures on held-out data. Runs alike on every rank; the policy may hold averaged weights meanwhile."""
        return {}

    def report(self) -> Report | None:
        """All that a finished run should be judged by, for `groupwise eval`: may take minutes. Asked of one rank."""
        return None

    def measures(self, rollouts: Rollouts, advantages: Tensor) -> Mapping[str, Tensor]:
        """Named numbers, one a row (NaN where a row has none), whose means over the whole step go into metrics.jsonl.

        The same names on every rank.
        """
        return {}

    def alarm(self, figures: Mapping[str, float]) -> str | None:
        """A sentence to warn with if a step's figures, those of metrics.jsonl, say that something is wrong; raise
        UserError to stop the run there instead."""
        return None

    def pictures(self) -> Mapping[str, Callable[[Path], None]]:
        """What the policy makes of held-out data, by file name: kept in the run folder of every evaluation's moment.
        Asked of one rank.
        """
        return {}

    def describe(self, rollouts: Rollouts) -> Sequence[Mapping[str, Any]]:
        """What a person would want to see of each row (JSON values), for samples.jsonl."""
        return [{} for _ in range(len(rollouts))]

    def notes(self) -> Sequence[str]:
        """What a person should know before training starts: shown with the preflight."""
        return ()

    def files(self) -> Mapping[str, bytes]:
        """JSON files that every checkpoint holds too: what is needed to use the policy without this workload. Weights
        that were trained with others are refused.
        """
        return {}


@dataclass(frozen=True)
class WorkloadConfig:
    """The settings of a workload. Subclass it beside the workload and import the heavy parts inside `build`."""

    def build(self, device: torch.device) -> Workload:
        """The workload itself, its policy on the device; the same on every rank."""
        raise NotImplementedError(f"{type(self).__name__} must define build(device)")

    def continuing(self, checkpoint: Path) -> Self:
        """The same settings to go on from a checkpoint: what would be made anew may be taken from its files."""
        return self

    def memory(self) -> MemoryModel | None:
        """What is known of this workload's memory without building it, in integers; None where nothing is."""
        return None

    def traced(self, job: Job) -> Mapping[str, int]:
        """Highest bytes of the stages ('rollout', 'update'), by following the real code with fake tensors."""
        raise UserError(
            f"{type(self).__name__} has no trace of its memory (its method traced(job)). `--probe` runs a real step."
        )


@dataclass(frozen=True)
class ReportTable:
    """A table for the screen: all cells are text."""

    title: str
    columns: Sequence[str]
    """The first is set to the left, the others to the right."""
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Report:
    figures: Mapping[str, Any]
    """JSON values; they become part of eval.json."""
    tables: Sequence[ReportTable] = ()
    pictures: Mapping[str, Callable[[Path], None]] | None = None
    """By file name: writes the picture to a path in the run folder."""
