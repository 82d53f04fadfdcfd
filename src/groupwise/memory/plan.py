"""The plan of a run: predicted bytes, proposals and what to lower.
Three settings side by side, what to lower first, and the numbers that divide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from groupwise.core.errors import UserError
from groupwise.core.shape import StepShape, even_pass_sizes, nearest_fitting
from groupwise.core.units import format_bytes
from groupwise.memory.stages import StageBytes, StepSpec

Predict = Callable[[StepSpec], StageBytes]
RECOMMENDED, AGGRESSIVE = 0.60, 0.85
"""Shares of the device that the two proposals aim at."""
_GROWTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""How many times more conditions a step are proposed at most."""


@dataclass(frozen=True)
class PlannedSetting:
    """A shape, and the memory it is predicted to take."""

    job: StepSpec
    stages: StageBytes
    device: int

    @property
    def shape(self) -> StepShape:
        return self.job.shape

    @property
    def utilization(self) -> float:
        return self.stages.peak / self.device

    @property
    def fits(self) -> bool:
        return self.stages.peak <= self.device

    def plain(self) -> dict[str, object]:
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
            "parts": self.stages.plain(),
        }


@dataclass(frozen=True)
class ReductionStep:
    """One thing to lower, on top of those before it."""

    what: str
    saves: int
    peak: int
    changes_result: bool

    def __str__(self) -> str:
        kind = " (changes the result)" if self.changes_result else ""
        return f"{self.what}{kind}: saves {format_bytes(self.saves)}, leaves {format_bytes(self.peak)}"


def evaluate_setting(job: StepSpec, predict: Predict, device: int) -> PlannedSetting:
    return PlannedSetting(job, predict(job).with_margin(), device)


def propose_setting(job: StepSpec, predict: Predict, device: int, share: float) -> PlannedSetting:
    """The most rows that stay below a share of the device.

    Where all rollouts of a rank go through in one pass already, more conditions a step make room for more rows. If not
    even one row stays below, one row it is.
    """
    best = evaluate_setting(_with_rows(job, 1), predict, device)
    for growth in _GROWTHS:
        per_step = job.shape.conditions_per_step * growth
        conditions = max(job.shape.conditions, 2 * per_step)
        wider = replace(job.shape, rows_per_pass=1, conditions=conditions, conditions_per_step=per_step)
        found = _max_rows_within(replace(job, shape=wider), predict, device, share)
        if found is None:
            break
        best = max(best, found, key=lambda each: each.shape.rows_per_pass)
        if found.shape.rows_per_pass < found.shape.rollouts_per_rank:
            break
    return best


def _max_rows_within(job: StepSpec, predict: Predict, device: int, share: float) -> PlannedSetting | None:
    """The fewest passes of equal size that stay below a share of the device; None where not even one row does."""
    for rows in even_pass_sizes(job.shape.rollouts_per_rank):
        setting = evaluate_setting(_with_rows(job, rows), predict, device)
        if setting.stages.peak <= share * device:
            return setting
    return None


def reduction_steps(
    job: StepSpec, predict: Predict, smaller: Sequence[tuple[str, Predict, bool]]
) -> list[ReductionStep]:
    """In order: what never changes the result first. Each is feasible, and on top of those before it."""
    found: list[ReductionStep] = []
    peak, rows = predict(job).with_margin().peak, job.shape.largest_pass
    now = job
    while rows > 1:
        fewer = rows // 2
        now = _with_rows(job, fewer)
        after = predict(now).with_margin().peak
        if after < peak:
            found.append(ReductionStep(f"rows_per_pass {rows} -> {fewer}", peak - after, after, False))
        peak, rows = after, fewer
    silent: dict[str, str] = {}  # what saves nothing by itself is named with the next that does, which builds on it
    for what, predicted, changes in smaller:
        after = predicted(now).with_margin().peak
        if after < peak:
            built_on = f"; with {', '.join(silent.values())}" if silent else ""
            found.append(ReductionStep(what + built_on, peak - after, after, changes))
            silent = {}
        else:
            name, value = what.split()[0], what.split(":")[0].rsplit("-> ")[-1]
            silent[name] = f"{name} {value}" if "->" in what else what
        peak = after
    return found


def check_weights_fit(job: StepSpec, predict: Predict, device: int) -> None:
    """Refuse a device that could not even hold the weights."""
    parts = predict(job).update
    weights = parts.get("weights", 0)
    if device < weights:
        raise UserError(
            f"--device-memory is {format_bytes(device)}, and the weights alone take {format_bytes(weights)} on each"
            f" rank: nothing can be trained there, {format_bytes(weights - device)} are missing. Take a larger device,"
            " more ranks with --sharded, a smaller model or a number format of fewer bytes."
        )


def nearest_valid_values(shape: StepShape) -> dict[str, list[int]]:
    """For each number of the shape, the nearest values that fit, below and above, the others unchanged."""
    names = ("conditions_per_step", "group_size", "ranks")
    return {name: nearest_fitting(shape, name) for name in names}


def _with_rows(job: StepSpec, rows: int) -> StepSpec:
    return replace(job, shape=replace(job.shape, rows_per_pass=rows))


class MemoryModel(Protocol):
    """What a workload knows of its memory: all that a plan asks for."""

    def stages(self, job: StepSpec) -> StageBytes:
        """Bytes by part at the fullest moment of rollout and update, on one rank."""
        ...

    def smaller(self) -> Sequence[tuple[str, MemoryModel, bool]]:
        """What else can be lowered: (what, how it would be, whether the result changes), each on top of the last."""
        ...


@dataclass(frozen=True)
class MemoryPlan:
    device: int
    current: PlannedSetting
    recommended: PlannedSetting
    aggressive: PlannedSetting
    lower: Sequence[ReductionStep]
    doubled: Mapping[str, int]
    """The peak if a number that is a loop over passes were doubled: hardly another one."""

    @property
    def fits(self) -> bool:
        return self.current.fits

    @property
    def settings(self) -> dict[str, PlannedSetting]:
        return {"current": self.current, "recommended": self.recommended, "aggressive": self.aggressive}

    def plain(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "device_bytes": self.device,
            "parts": self.current.stages.plain(),
            "peak_bytes": self.current.stages.peak,
            "settings": {name: found.plain() for name, found in self.settings.items()},
            "fits": self.fits,
            "missing_bytes": max(0, self.current.stages.peak - self.device),
            "lower_first": [
                {
                    "what": step.what,
                    "saves_bytes": step.saves,
                    "peak_bytes": step.peak,
                    "changes_result": step.changes_result,
                }
                for step in self.lower
            ],
            "peak_bytes_if_doubled": dict(self.doubled),
            "nearest_that_divide": nearest_valid_values(self.current.shape),
        }


def make_plan(model: MemoryModel, job: StepSpec, device: int) -> MemoryPlan:
    predict: Predict = model.stages
    check_weights_fit(job, predict, device)
    smaller = [(what, changed.stages, changes) for what, changed, changes in model.smaller()]
    return MemoryPlan(
        device,
        evaluate_setting(job, predict, device),
        propose_setting(job, predict, device, RECOMMENDED),
        propose_setting(job, predict, device, AGGRESSIVE),
        reduction_steps(job, predict, smaller),
        {name: predict(_doubled(job, name)).with_margin().peak for name in ("conditions_per_step", "group_size")},
    )


def _doubled(job: StepSpec, name: str) -> StepSpec:
    """Always a shape that fits: what divided before divides twice as much, and the dataset is as large as need be."""
    shape = replace(job.shape, conditions=max(job.shape.conditions, 4 * job.shape.conditions_per_step))
    return replace(job, shape=replace(shape, **{name: 2 * getattr(shape, name)}))
