"""A run's memory as it is, beside what was planned; and a word when the device is too full, or mostly empty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from groupwise.core.errors import UserError
from groupwise.core.units import format_bytes
from groupwise.memory.measure import MemoryUsage
from groupwise.memory.plan import MemoryModel, MemoryPlan, make_plan
from groupwise.memory.stages import StepSpec
from groupwise.workloads.base import WorkloadConfig

FULL, EMPTY = 0.9, 0.4
_MIN_STEPS = 3
"""Steps after which a device that stays mostly empty is worth a word."""


class Monitor:
    """Told of every step's memory; warns once for each reason."""

    def __init__(
        self,
        model: MemoryModel | None,
        job: StepSpec,
        *,
        device: int,
        base: int,
        accelerator: bool,
        warn: Callable[[str], None],
    ):
        self._model, self._job, self._base, self._accelerator, self._warn = model, job, base, accelerator, warn
        self.plan = _plan(model, job, device)
        self._said: set[str] = set()
        self._steps = 0

    def see(self, memory: MemoryUsage, rows_per_pass: int) -> MemoryUsage:
        """The same with the prediction for the rows that were taken."""
        self._steps += 1
        if self._model is not None:
            shape = replace(self._job.shape, rows_per_pass=rows_per_pass)
            peak = self._model.predict(replace(self._job, shape=shape)).peak
            memory = replace(memory, predicted=self._base + peak)
        if memory.utilization > FULL:
            self._once("full", f"{_filled(memory)}: the next long rollout may not fit. {self._lower()}")
        elif memory.utilization < EMPTY and self._steps >= _MIN_STEPS and self._accelerator:
            self._once("empty", f"{_filled(memory)}. {self._raise()}")
        return memory

    def lower_first(self) -> list[str]:
        """The plan's list, for a run that ran out of memory at one row."""
        return [str(step) for step in self.plan.reductions] if self.plan else []

    def _lower(self) -> str:
        rows = [step.description for step in self.plan.reductions] if self.plan else []
        return f"To be safe: {rows[0]}." if rows else "To be safe, lower rows_per_pass."

    def _raise(self) -> str:
        if self.plan is None:
            return "A higher rows_per_pass would use it; it never changes the result."
        better = self.plan.recommended.shape
        return (
            f"rows_per_pass {better.rows_per_pass} with conditions_per_step {better.conditions_per_step} would use"
            f" {self.plan.recommended.utilization:.0%}."
        )

    def _once(self, reason: str, text: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            self._warn(text)


def known_memory(workload: WorkloadConfig) -> MemoryModel | None:
    """The workload's memory, where it can be told: a model on the hub, say, has no sizes here before it is loaded."""
    try:
        return workload.memory_model()
    except UserError:
        return None


def _filled(memory: MemoryUsage) -> str:
    return f"Memory peaks at {format_bytes(memory.peak)}, {memory.utilization:.0%} of the device"


def _plan(model: MemoryModel | None, job: StepSpec, device: int) -> MemoryPlan | None:
    """None also where the plan says that it cannot be: then the run itself will tell."""
    try:
        return None if model is None else make_plan(model, job, device)
    except UserError:
        return None
