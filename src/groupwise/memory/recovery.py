"""When memory runs out: all ranks agree, free, take smaller pieces, and do the same again. The result stays the same.

Every stage that may fail runs inside `comm.together`, which raises `OutOfMemoryError` on all ranks when it failed on
one. So all of them arrive here with the same error and lower the same number; nobody is left waiting.
Into how many pieces the work is cut at present: memory, not results.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from groupwise.core.errors import OutOfMemoryError, UserError
from groupwise.core.shape import StepShape
from groupwise.workloads.base import Workload


def own_name(stage: str) -> str:
    """What a workload's own number for a stage is called; reward_rows are those that rewards() gets in one call."""
    return "rows_per_reward_pass" if stage == "reward" else f"{stage}_rows"


@dataclass
class RowLimits:
    """Rows that are taken at a time. Begins as configured; lowered when memory runs out, on all ranks alike."""

    rows_per_pass: int
    reward_rows: int | None = None
    """Rows judged at a time, in whole groups; None for all that a rank has."""
    stage_rows: Mapping[str, int] = field(default_factory=dict)
    """The workload's own numbers, where they were lowered."""
    shrunk: Mapping[str, int] = field(default_factory=dict)
    """What had to become smaller at one row, as the user allowed: this does change the result."""
    lowered: list[tuple[str, int]] = field(default_factory=list)
    """What was lowered and from where, in order: the way back."""
    quiet: int = 0
    """Steps since memory last ran out."""
    shortages: int = 0
    """How often it ran out in this run."""

    def rows(self) -> dict[str, int]:
        """The numbers in force, by the names they are shown under."""
        own = {own_name(stage): rows for stage, rows in self.stage_rows.items()}
        judged = {"reward_rows": self.reward_rows} if self.reward_rows else {}
        return {"rows_per_pass": self.rows_per_pass, **judged, **own, **self.shrunk}


P = ParamSpec("P")
T = TypeVar("T")
Stage = Literal["rollout", "reward", "update", "evaluation"]


class BeginAgain(Exception):  # noqa: N818 - no error: the way back to the beginning of the step
    """What a step is made of has become smaller, so its rollouts must be made anew."""


class Retry(Protocol):
    """Calls a function of a stage, perhaps more than once."""

    def __call__(self, stage: Stage, act: Callable[P, T], /, *words: P.args, **named: P.kwargs) -> T: ...


def no_retry(stage: Stage, act: Callable[P, T], /, *words: P.args, **named: P.kwargs) -> T:
    """No second try: memory that runs out stops everything."""
    return act(*words, **named)


GENERAL_ADVICE = (
    "the workload's own sizes that no pass can cut: longest rollout, resolution, number of frames",
    "the bytes of a number: bfloat16 takes half of float32",
    "what is trained: an adapter needs gradients and optimizer only for itself",
)
"""For a workload that gives no memory plan. Shorter rollouts change what is learned, so nothing is lowered unasked."""


@dataclass
class Recovery:
    """What is known about the run that decides how to go on; `cut` is what it changes."""

    workload: Workload
    cut: RowLimits
    shape: StepShape
    warn: Callable[[str], None]
    grow_after: int = 0
    lower_first: Callable[[], Sequence[str]] = lambda: GENERAL_ADVICE
    """What the plan would lower, first things first: asked when nothing is left to cut."""
    may_shrink: Sequence[str] = ()
    """What the user allows to be halved when nothing is left to cut; it changes the result."""
    shortages: int = 0
    """Since the last complete step."""

    def attempt(self, stage: Stage, act: Callable[P, T], /, *words: P.args, **named: P.kwargs) -> T:
        """What `act` returns, in as small pieces as it takes."""
        before = RngAndBuffers.of(self.workload.policy)
        while True:
            try:
                return act(*words, **named)
            except OutOfMemoryError as error:
                told = str(error)
            # Only here, outside the clause, is the error gone and with it the frames that held the tensors.
            self.shortages += 1
            self._lower(stage, told)
            release_memory()
            before.again(self.workload.policy)

    def whole(self, act: Callable[P, T], /, *words: P.args, **named: P.kwargs) -> T:
        """What `act` returns, from its beginning as often as something had to shrink on the way."""
        before = RngAndBuffers.of(self.workload.policy) if self.may_shrink else None
        while True:
            try:
                return act(*words, **named)
            except BeginAgain:
                assert before is not None, "nothing shrinks unless it may"
            release_memory()
            before.again(self.workload.policy)

    def step_done(self) -> dict[str, float]:
        """The metrics of a complete step; after enough quiet ones the pieces grow again."""
        metrics = {"out_of_memory": float(self.shortages), **{n: float(v) for n, v in self.cut.rows().items()}}
        self.cut.quiet = 0 if self.shortages else self.cut.quiet + 1
        self.shortages = 0
        # Each shortage doubles the wait, so that a setting that never fits is not tried for ever.
        patience = self.grow_after << max(0, self.cut.shortages - 1)
        if self.grow_after and self.cut.lowered and self.cut.quiet >= patience:
            self._grow()
        return metrics

    def _lower(self, stage: Stage, told: str) -> None:
        cut, name = self.cut, self._knob(stage)
        rows, fewer = self._rows(name), self._fewer(name)
        cut.shortages += 1
        if fewer is None:
            self._shrink(stage, told)
            return
        cut.lowered.append((name, rows))
        self._set(name, fewer)
        what = "evaluation" if stage == "evaluation" else "step"
        again = f"the {what} is repeated, its result is the same."
        self.warn(f"Out of memory in {stage}: {told} {name} {rows} -> {fewer}; {again}")

    def _shrink(self, stage: Stage, told: str) -> None:
        """Nothing is left to cut. Halve what the user allowed by name, or stop."""
        sizes = self.workload.shrinkable
        name = next((name for name in self.may_shrink if sizes[name] > 1), None)
        if name is None:
            raise UserError(self._at_the_end(stage, told))
        half = sizes[name] // 2
        self.warn(
            f"Out of memory in {stage} at one row: {told} {name} {sizes[name]} -> {half} for the rest of the run, as"
            " --may-shrink allows. THIS CHANGES WHAT IS LEARNED."
        )
        self.workload.shrinkable = {**sizes, name: half}
        self.cut.shrunk = {**self.cut.shrunk, name: half}
        if stage != "evaluation":
            raise BeginAgain

    def _knob(self, stage: Stage) -> str:
        """The workload's own number for this stage where it has one that can still be lowered, else the run's."""
        if self.workload.stage_rows.get(stage, 0) > 1:
            return own_name(stage)
        return f"{stage}_rows" if stage in ("reward", "evaluation") else "rows_per_pass"

    def _own(self, name: str) -> str | None:
        """The stage whose number of the workload's own is called so."""
        return next((stage for stage in self.workload.stage_rows if own_name(stage) == name), None)

    def _rows(self, name: str) -> int:
        stage = self._own(name)
        if stage is not None:
            return self.workload.stage_rows[stage]
        if name == "reward_rows":
            return self.cut.reward_rows or self.shape.rollouts_per_rank
        return 1 if name == "evaluation_rows" else self.cut.rows_per_pass

    def _fewer(self, name: str) -> int | None:
        rows = self._rows(name)
        if name == "reward_rows":
            # A reward may compare siblings: what a rank has of a group is judged together, however few rows are asked.
            return rows // 2 or None
        if name == "evaluation_rows":
            return rows // 2 or None
        # a cap above what a rank has cuts nothing: half of that would be tried in vain
        return min(rows, self.shape.rollouts_per_rank) // 2 or None

    def _set(self, name: str, rows: int) -> None:
        stage = self._own(name)
        if stage is not None:
            self.workload.stage_rows = {**self.workload.stage_rows, stage: rows}
            self.cut.stage_rows = {**self.cut.stage_rows, stage: rows}
        elif name == "reward_rows":
            self.cut.reward_rows = rows
        else:
            self.cut.rows_per_pass = rows

    def _grow(self) -> None:
        name, rows = self.cut.lowered.pop()
        self.warn(f"{self.cut.quiet} steps without a shortage of memory: {name} {self._rows(name)} -> {rows} again.")
        self._set(name, rows)
        self.cut.quiet = 0

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on with the pieces of a checkpoint."""
        for name in asdict(self.cut):
            if name in saved:
                setattr(self.cut, name, saved[name])
        self.cut.lowered = [(name, rows) for name, rows in self.cut.lowered]
        known = {stage: rows for stage, rows in self.cut.stage_rows.items() if stage in self.workload.stage_rows}
        self.workload.stage_rows = {**self.workload.stage_rows, **known}
        shrunk = {name: size for name, size in self.cut.shrunk.items() if name in self.workload.shrinkable}
        self.workload.shrinkable = {**self.workload.shrinkable, **shrunk}

    def _at_the_end(self, stage: Stage, told: str) -> str:
        name = self._knob(stage)
        if stage == "evaluation" and stage not in self.workload.stage_rows:
            return (
                f"Out of memory in evaluation, and {type(self.workload).__name__} does not say how many rows it takes"
                f" at a time there (stage_rows, 'evaluation'): {told} Evaluate on fewer, or give it that number."
            )
        rows, advice = self._rows(name), self.lower_first()
        listed = "; ".join(f"{nth}. {what}" for nth, what in enumerate(advice, 1))
        return (
            f"Out of memory in {stage} with {name} {rows}, and there are no smaller pieces: {told} What to lower, first"
            f" things first: {listed}. The complete steps are in the newest checkpoint; --resume goes on from there."
        )


def check_shrinkable(workload: Workload, names: Sequence[str]) -> None:
    """Refuse a permission that could not be used."""
    for name in names:
        if name not in workload.shrinkable:
            offered = " or ".join(workload.shrinkable) or "nothing"
            groups = (
                " Members of a group go through the model one after another then: fewer of them hardly save memory."
            )
            raise UserError(
                f"--may-shrink names '{name}': {type(workload).__name__} can shrink {offered} when memory runs out at"
                f" one row.{groups if name == 'group_size' else ''}"
            )


@dataclass(frozen=True)
class RngAndBuffers:
    """What a stage may change on its way, so that a second try begins like the first: generators and buffers."""

    generators: tuple[Tensor, ...]
    buffers: Mapping[str, Tensor]

    @staticmethod
    def of(policy: nn.Module) -> RngAndBuffers:
        buffers = {name: buffer.clone() for name, buffer in policy.named_buffers()}
        return RngAndBuffers(tuple(module.get_rng_state() for module in _generators()), buffers)

    def again(self, policy: nn.Module) -> None:
        for module, state in zip(_generators(), self.generators, strict=True):
            module.set_rng_state(state)
        for name, buffer in policy.named_buffers():
            buffer.copy_(self.buffers[name])


def _generators() -> list[Any]:
    """The modules whose generators the device in use draws from."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [torch.random, *([torch.get_device_module(accelerator)] if accelerator is not None else [])]


def release_memory() -> None:
    """Give back what nobody holds any more, before the next try."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
