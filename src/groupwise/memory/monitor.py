"""Measured memory of a run beside the planned one; one warning when utilization is too high or too low."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from groupwise.core.errors import UserError
from groupwise.core.units import format_bytes
from groupwise.memory.measure import MemoryUsage
from groupwise.memory.plan import MemoryModel, MemoryPlan, make_plan
from groupwise.memory.stages import StageBytes, StepSpec

FULL, EMPTY = 0.9, 0.4
_MIN_STEPS = 3
"""Steps before low utilization is worth a warning."""


class Monitor:
    """Records the memory of every step; warns once for each reason."""

    def __init__(
        self,
        model: MemoryModel | None,
        spec: StepSpec,
        *,
        device_bytes: int,
        base_bytes: int,
        on_accelerator: bool,
        warn: Callable[[str], None],
    ):
        self._model, self._spec, self._base_bytes = model, spec, base_bytes
        self._on_accelerator, self._warn = on_accelerator, warn
        self.plan = _plan(model, spec, device_bytes)
        self._warned: set[str] = set()
        self._steps = 0

    def record(self, memory: MemoryUsage, rows_per_pass: int) -> MemoryUsage:
        """The same usage with the plan's prediction for this number of rows."""
        self._steps += 1
        if self._model is not None:
            shape = replace(self._spec.shape, rows_per_pass=rows_per_pass)
            planned = self._model.predict(replace(self._spec, shape=shape))
            if self._steps == 1 and not self._on_accelerator:
                # resident memory: libraries and data count, too, which come with the workload and the first step
                self._base_bytes = max(0, memory.current - _kept_bytes(planned))
            memory = replace(memory, predicted=self._base_bytes + planned.peak)
        if memory.utilization > FULL:
            self._warn_once("full", f"{_describe(memory)}: the next long rollout may not fit. {self._safer()}")
        elif memory.utilization < EMPTY and self._steps >= _MIN_STEPS and self._on_accelerator:
            self._warn_once("empty", f"{_describe(memory)}. {self._larger()}")
        return memory

    def reductions(self) -> list[str]:
        """What the plan would reduce, in order, for a run that ran out of memory at one row."""
        return [str(step) for step in self.plan.reductions] if self.plan else []

    def _safer(self) -> str:
        steps = self.plan.reductions if self.plan else []
        return f"To be safe: {steps[0].description}." if steps else "To be safe, lower rows_per_pass."

    def _larger(self) -> str:
        if self.plan is None:
            return "A higher rows_per_pass would use it; it never changes the result."
        better = self.plan.recommended.shape
        return (
            f"rows_per_pass {better.rows_per_pass} with conditions_per_step {better.conditions_per_step} would use"
            f" {self.plan.recommended.utilization:.0%}."
        )

    def _warn_once(self, reason: str, text: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            self._warn(text)


def _kept_bytes(planned: StageBytes) -> int:
    """Planned bytes that are still there after a step."""
    kept = ("weights", "gradients", "optimizer", "reference", "EMA weights")
    return sum(planned.update.get(name, 0) for name in kept)


def _describe(memory: MemoryUsage) -> str:
    return f"Memory peaks at {format_bytes(memory.peak)}, {memory.utilization:.0%} of the device"


def _plan(model: MemoryModel | None, spec: StepSpec, device_bytes: int) -> MemoryPlan | None:
    """None also where no setting fits by the plan: the run itself will show whether that is true."""
    try:
        return None if model is None else make_plan(model, spec, device_bytes)
    except UserError:
        return None
