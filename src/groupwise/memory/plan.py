"""MemoryPlan: the current, a recommended and an aggressive setting; what to reduce first. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from groupwise.core.errors import UserError
from groupwise.core.shape import MAX_ROLLOUTS_PER_STEP, StepShape, even_pass_sizes, nearest_fitting
from groupwise.core.units import format_bytes
from groupwise.memory.sharding import Sharding
from groupwise.memory.stages import StageBytes, StepSpec

RECOMMENDED, AGGRESSIVE = 0.60, 0.85
"""Shares of the device that the two proposals aim at."""
_GROWTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""How many times more conditions per step a proposal may have."""
_MOST_CARDS = 4096
"""Among how many the smallest number that fits is searched."""


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
            "sharding": _sharding_to_dict(self.spec.sharding),
            "parts": self.stages.to_dict(),
            "host_bytes": dict(self.stages.host),
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
    fewest_ranks: PlannedSetting | None = None
    """The current setting on the smallest number of ranks on which it fits; None where no number is enough."""

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
            "sharding": _sharding_to_dict(self.current.spec.sharding),
            "fewest_ranks": None if self.fewest_ranks is None else self.fewest_ranks.to_dict(),
        }


def make_plan(model: MemoryModel, spec: StepSpec, device_bytes: int) -> MemoryPlan:
    check_weights_fit(model, spec, device_bytes)
    current = evaluate_setting(model, spec, device_bytes)
    return MemoryPlan(
        device_bytes,
        current,
        propose_setting(model, spec, device_bytes, RECOMMENDED),
        propose_setting(model, spec, device_bytes, AGGRESSIVE),
        reduction_steps(model, current.spec),
        {name: _peak(model, _doubled(current.spec, name)) for name in ("conditions_per_step", "group_size")},
        fewest_ranks(model, spec, device_bytes),
    )


def needs_sharding(model: MemoryModel, spec: StepSpec, device_bytes: int) -> bool:
    """What `--shard auto` decides: whether there are other ranks to share with and a whole copy does not fit."""
    return spec.shape.ranks > 1 and not evaluate_setting(model, replace(spec, sharding=None), device_bytes).fits


def check_weights_fit(model: MemoryModel, spec: StepSpec, device_bytes: int) -> None:
    """Refuse a device that could not even hold the weights."""
    weights = model.predict(spec).update.get("weights", 0)
    if device_bytes < weights:
        raise UserError(
            f"--device-memory is {format_bytes(device_bytes)}, and the weights alone take {format_bytes(weights)} on"
            f" each rank: {format_bytes(weights - device_bytes)} are missing before anything is trained. Take a larger"
            f" device, a smaller model or a dtype of fewer bytes{_sharding_remedy(spec)}."
        )


def evaluate_setting(model: MemoryModel, spec: StepSpec, device_bytes: int, share: float = 1.0) -> PlannedSetting:
    """What a setting takes. Sharded, and with the rollout's mode auto, all weights are gathered for the rollout if that
    fits a share of the device, and else block by block.
    """
    for sharding in _with_rollout_mode(spec.sharding):
        spec = replace(spec, sharding=sharding)
        stages = model.predict(spec).with_margin()
        if sum(stages.rollout.values()) <= share * device_bytes:
            break
    return PlannedSetting(spec, stages, device_bytes)


def fewest_ranks(model: MemoryModel, spec: StepSpec, device_bytes: int) -> PlannedSetting | None:
    """The smallest number of ranks on which the step fits, in passes of as many rows, sharded as the spec is.

    More ranks than the step has groups are tried with one group on each.
    """
    for shape in _on_more_ranks(spec.shape):
        sharding = spec.sharding and spec.sharding.on_ranks(shape.ranks)
        setting = evaluate_setting(model, replace(spec, shape=shape, sharding=sharding), device_bytes)
        if setting.fits:
            return setting
    return None


def describe_fewest_ranks(plan: MemoryPlan) -> str:
    """How many cards the current setting needs, as a phrase."""
    if plan.fewest_ranks is None:
        return "no number of cards is enough for this setting: what is not sharded is too large already"
    shape, peak = plan.fewest_ranks.shape, format_bytes(plan.fewest_ranks.stages.peak)
    step = f" with conditions_per_step {shape.conditions_per_step}, one group on each,"
    grown = shape.conditions_per_step != plan.current.shape.conditions_per_step
    cards = f"{shape.ranks} card" + ("s" if shape.ranks > 1 else "")
    return f"{cards}{step if grown else ''} at {peak} each ({plan.fewest_ranks.utilization:.0%})"


def _on_more_ranks(shape: StepShape) -> Iterator[StepShape]:
    """The step on one rank, and on all larger numbers that it can be divided among, at most 4,096."""
    per_step = shape.conditions_per_step
    divided = per_step if shape.placement == "whole" else shape.rollouts_per_step
    for ranks in range(1, min(divided, _MOST_CARDS) + 1):
        if divided % ranks == 0:
            yield replace(shape, ranks=ranks)
    for ranks in range(2 * per_step, _MOST_CARDS + 1, per_step):
        if ranks > divided and ranks * shape.group_size <= MAX_ROLLOUTS_PER_STEP:
            conditions = max(shape.conditions, 2 * ranks)
            yield replace(shape, ranks=ranks, conditions_per_step=ranks, conditions=conditions)


def propose_setting(model: MemoryModel, spec: StepSpec, device_bytes: int, share: float) -> PlannedSetting:
    """The most rows per pass that stay below a share of the device; one row where not even that does.

    Where all rollouts of a rank go through in one pass already, more conditions per step allow more rows.
    """
    best = evaluate_setting(model, _with_rows(spec, 1), device_bytes, share)
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
        setting = evaluate_setting(model, _with_rows(spec, rows), device_bytes, share)
        if setting.utilization <= share:
            return setting
    return None


def _with_rollout_mode(sharding: Sharding | None) -> Sequence[Sharding | None]:
    """In order of preference: what is gathered once needs no more traffic in a rollout, but more memory."""
    if sharding is None or sharding.rollout != "auto":
        return [sharding]
    return [replace(sharding, rollout="whole"), replace(sharding, rollout="blocks")]


def _sharding_to_dict(sharding: Sharding | None) -> dict[str, object] | None:
    return None if sharding is None else dict(vars(sharding))


def _sharding_remedy(spec: StepSpec) -> str:
    if spec.sharding is None:
        return "; or shard them over several ranks with --shard full" if spec.shape.ranks > 1 else ""
    return f"; or shard them over more than {spec.sharding.ranks} ranks"


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
