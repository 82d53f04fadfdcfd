"""MemoryPlan: the current, a recommended and an aggressive setting; what to reduce first. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from groupwise.core.errors import UserError
from groupwise.core.shape import MAX_ROLLOUTS_PER_STEP, StepShape, even_pass_sizes, nearest_fitting
from groupwise.core.units import format_bytes
from groupwise.memory.stages import StageBytes, StepSpec

RECOMMENDED, AGGRESSIVE = 0.60, 0.85
"""Shares of the device that the two proposals aim at."""
_GROWTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""How many times more conditions per step a proposal may have."""


class MemoryModel(Protocol):
    """What a workload knows about its memory: all that a plan needs."""

    def predict(self, spec: StepSpec) -> StageBytes:
        """Bytes by part at the peak of rollout and update, on one rank."""
        ...

    def reductions(self) -> Sequence[Reduction]:
        """What can be reduced besides rows_per_pass, each on top of those before it."""
        ...


@dataclass(frozen=True)
class Reduction:
    """A setting with a value that takes less memory."""

    name: str
    value: object
    model: MemoryModel
    """The memory model with this value, and with those of the reductions before it."""
    previous: object = None
    """The value before, where it says something."""
    effect: str = ""
    """What else changes."""
    changes_result: bool = False

    @property
    def description(self) -> str:
        change = (
            f"{self.name} {self.value}" if self.previous is None else f"{self.name} {self.previous} -> {self.value}"
        )
        return f"{change} ({self.effect})" if self.effect else change


@dataclass(frozen=True)
class ReductionStep:
    """A reduction that saves memory, on top of those before it."""

    description: str
    saved_bytes: int
    peak_bytes: int
    changes_result: bool

    def __str__(self) -> str:
        warning = " (changes the result)" if self.changes_result else ""
        saved, peak = format_bytes(self.saved_bytes), format_bytes(self.peak_bytes)
        return f"{self.description}{warning}: saves {saved}, leaves {peak}"

    def to_dict(self) -> dict[str, object]:
        return {
            "what": self.description,
            "saves_bytes": self.saved_bytes,
            "peak_bytes": self.peak_bytes,
            "changes_result": self.changes_result,
        }


@dataclass(frozen=True)
class PlannedSetting:
    """A shape, and the memory it is predicted to take."""

    spec: StepSpec
    stages: StageBytes
    device_bytes: int

    @property
    def shape(self) -> StepShape:
        return self.spec.shape

    @property
    def utilization(self) -> float:
        return self.stages.peak / self.device_bytes

    @property
    def fits(self) -> bool:
        return self.stages.peak <= self.device_bytes

    def to_dict(self) -> dict[str, object]:
        shape = self.shape
        return {
            "rows_per_pass": shape.rows_per_pass,
            "conditions_per_step": shape.conditions_per_step,
            "group_size": shape.group_size,
            "ranks": shape.ranks,
            "rollouts_per_step": shape.rollouts_per_step,
            "passes_per_step": shape.passes,
            "bytes": self.stages.peak,
            "utilization": self.utilization,
            "fits": self.fits,
            "parts": self.stages.to_dict(),
        }


@dataclass(frozen=True)
class MemoryPlan:
    device_bytes: int
    current: PlannedSetting
    recommended: PlannedSetting
    aggressive: PlannedSetting
    reductions: Sequence[ReductionStep]
    peak_if_doubled: Mapping[str, int]
    """The peak with twice the conditions_per_step or group_size: about the same, since these are loops over passes."""

    @property
    def fits(self) -> bool:
        return self.current.fits

    @property
    def settings(self) -> dict[str, PlannedSetting]:
        return {"current": self.current, "recommended": self.recommended, "aggressive": self.aggressive}

    def to_dict(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "device_bytes": self.device_bytes,
            "parts": self.current.stages.to_dict(),
            "peak_bytes": self.current.stages.peak,
            "settings": {name: setting.to_dict() for name, setting in self.settings.items()},
            "fits": self.fits,
            "missing_bytes": max(0, self.current.stages.peak - self.device_bytes),
            "lower_first": [step.to_dict() for step in self.reductions],
            "peak_bytes_if_doubled": dict(self.peak_if_doubled),
            "nearest_that_divide": nearest_valid_values(self.current.shape),
        }


def make_plan(model: MemoryModel, spec: StepSpec, device_bytes: int) -> MemoryPlan:
    check_weights_fit(model, spec, device_bytes)
    return MemoryPlan(
        device_bytes,
        evaluate_setting(model, spec, device_bytes),
        propose_setting(model, spec, device_bytes, RECOMMENDED),
        propose_setting(model, spec, device_bytes, AGGRESSIVE),
        reduction_steps(model, spec),
        {name: _peak(model, _doubled(spec, name)) for name in ("conditions_per_step", "group_size")},
    )


def check_weights_fit(model: MemoryModel, spec: StepSpec, device_bytes: int) -> None:
    """Refuse a device that could not even hold the weights."""
    weights = model.predict(spec).update.get("weights", 0)
    if device_bytes < weights:
        raise UserError(
            f"--device-memory is {format_bytes(device_bytes)}, and the weights alone take {format_bytes(weights)} on"
            f" each rank: {format_bytes(weights - device_bytes)} are missing before anything is trained. Take a larger"
            " device, a smaller model or a dtype of fewer bytes."
        )


def evaluate_setting(model: MemoryModel, spec: StepSpec, device_bytes: int) -> PlannedSetting:
    return PlannedSetting(spec, model.predict(spec).with_margin(), device_bytes)


def propose_setting(model: MemoryModel, spec: StepSpec, device_bytes: int, share: float) -> PlannedSetting:
    """The most rows per pass that stay below a share of the device; one row where not even that does.

    Where all rollouts of a rank go through in one pass already, more conditions per step allow more rows.
    """
    best = evaluate_setting(model, _with_rows(spec, 1), device_bytes)
    for growth in _GROWTHS:
        per_step = spec.shape.conditions_per_step * growth
        if per_step * spec.shape.group_size > MAX_ROLLOUTS_PER_STEP:
            break
        conditions = max(spec.shape.conditions, 2 * per_step)
        wider = replace(spec.shape, rows_per_pass=1, conditions=conditions, conditions_per_step=per_step)
        setting = _max_rows_within(model, replace(spec, shape=wider), device_bytes, share)
        if setting is None:
            break
        best = max(best, setting, key=lambda candidate: candidate.shape.rows_per_pass)
        if setting.shape.passes > 1:
            break
    return best


def reduction_steps(model: MemoryModel, spec: StepSpec) -> list[ReductionStep]:
    """What to reduce, in order: first what never changes the result. Each step is on top of those before it."""
    steps: list[ReductionStep] = []
    peak, rows = _peak(model, spec), spec.shape.largest_pass
    while rows > 1:
        spec = _with_rows(spec, rows // 2)
        lower = _peak(model, spec)
        if lower < peak:
            steps.append(ReductionStep(f"rows_per_pass {rows} -> {rows // 2}", peak - lower, lower, False))
        peak, rows = lower, rows // 2
    without_effect: dict[str, Reduction] = {}  # named with the next reduction that saves memory, which builds on it
    for reduction in model.reductions():
        lower = _peak(reduction.model, spec)
        without_effect.pop(reduction.name, None)
        if lower < peak:
            others = ", ".join(f"{name} {other.value}" for name, other in without_effect.items())
            description = reduction.description + (f"; with {others}" if others else "")
            steps.append(ReductionStep(description, peak - lower, lower, reduction.changes_result))
            without_effect = {}
        else:
            without_effect[reduction.name] = reduction
        peak = lower
    return steps


def nearest_valid_values(shape: StepShape) -> dict[str, list[int]]:
    """For each number of the shape, the nearest values that fit, below and above, the others unchanged."""
    return {name: nearest_fitting(shape, name) for name in ("conditions_per_step", "group_size", "ranks")}


def _max_rows_within(model: MemoryModel, spec: StepSpec, device_bytes: int, share: float) -> PlannedSetting | None:
    """The fewest passes of equal size that stay below a share of the device; None where not even one row does."""
    for rows in even_pass_sizes(spec.shape.rollouts_per_rank):
        setting = evaluate_setting(model, _with_rows(spec, rows), device_bytes)
        if setting.utilization <= share:
            return setting
    return None


def _peak(model: MemoryModel, spec: StepSpec) -> int:
    return model.predict(spec).with_margin().peak


def _with_rows(spec: StepSpec, rows: int) -> StepSpec:
    return replace(spec, shape=replace(spec.shape, rows_per_pass=rows))


def _doubled(spec: StepSpec, name: str) -> StepSpec:
    """Twice as much of one number, with a dataset that is large enough; as it is where a step cannot have twice."""
    if 2 * spec.shape.rollouts_per_step > MAX_ROLLOUTS_PER_STEP:
        return spec
    shape = replace(spec.shape, conditions=max(spec.shape.conditions, 4 * spec.shape.conditions_per_step))
    return replace(spec, shape=replace(shape, **{name: 2 * getattr(shape, name)}))
