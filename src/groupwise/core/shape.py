"""The arithmetic of a step: what fits, and the nearest values that do. No torch, so `--help` is fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from groupwise.core.errors import UserError

PLACEMENTS = ("whole", "spread", "shuffled")
UNKNOWN_DATASET_SIZE = 10**12
"""Conditions of a dataset that is not known yet: never too few."""


@dataclass(frozen=True)
class StepShape:
    """How many of everything a step has. An impossible combination is refused when it is made."""

    conditions: int
    """Conditions in the dataset: an epoch visits each of them once."""
    conditions_per_step: int
    group_size: int
    ranks: int = 1
    rows_per_pass: int = 1
    kind: str = "whole"

    def __post_init__(self) -> None:
        for broken in _violations(self):
            raise UserError(broken + _suggestion(self))

    @property
    def rollouts_per_step(self) -> int:
        return self.conditions_per_step * self.group_size

    @property
    def rollouts_per_rank(self) -> int:
        return self.rollouts_per_step // self.ranks

    @property
    def passes(self) -> int:
        return self.rollouts_per_rank // self.rows_per_pass

    @property
    def steps_per_epoch(self) -> float:
        """Not rounded: a step that begins in one epoch may end in the next."""
        return self.conditions / self.conditions_per_step


def _violations(shape: StepShape) -> Iterator[str]:
    """The rules that this shape breaks, the simplest first, each as a sentence."""
    for name in ("conditions", "conditions_per_step", "ranks", "rows_per_pass"):
        if getattr(shape, name) < 1:
            yield f"{name} is {getattr(shape, name)}: it must be at least 1."
            return
    if shape.group_size < 2:
        yield (
            f"group_size is {shape.group_size}: a group is compared with itself, so it needs at least 2 members"
            " to learn anything. Take 2 or more (8 is common)."
        )
        return
    yield from _dataset_violations(shape)
    yield from _placement_violations(shape)


def _dataset_violations(shape: StepShape) -> Iterator[str]:
    conditions, per_step = shape.conditions, shape.conditions_per_step
    if conditions < per_step:
        yield (
            f"The dataset holds {conditions} conditions and conditions_per_step is {per_step}: a step draws its"
            " conditions without replacement."
        )
    elif conditions % per_step and conditions < 2 * per_step - 1:
        yield (
            f"The dataset holds {conditions} conditions and conditions_per_step is {per_step}: with fewer than"
            f" {2 * per_step - 1} conditions, conditions_per_step must divide them, because a step that spans two"
            " epochs could repeat a condition."
        )


def _placement_violations(shape: StepShape) -> Iterator[str]:
    rollouts, seats = shape.rollouts_per_step, shape.ranks * shape.rows_per_pass
    if shape.kind == "whole" and shape.conditions_per_step % shape.ranks:
        yield (
            f"conditions_per_step is {shape.conditions_per_step}, which does not divide over {shape.ranks} ranks:"
            " placement 'whole' keeps each group on one rank."
        )
    if shape.kind == "whole" and shape.group_size % shape.rows_per_pass and shape.rows_per_pass % shape.group_size:
        yield (
            f"rows_per_pass is {shape.rows_per_pass}, which neither divides group_size {shape.group_size} nor is a"
            " multiple of it: placement 'whole' keeps a group in whole passes."
        )
    if rollouts % seats:
        yield (
            f"conditions_per_step {shape.conditions_per_step} x group_size {shape.group_size} = {rollouts} rollouts"
            f" do not fill passes of {shape.ranks} ranks x rows_per_pass {shape.rows_per_pass} = {seats} rows."
        )


def _suggestion(shape: StepShape) -> str:
    """The nearest values that fit, one knob changed at a time."""
    options = []
    for name in ("conditions_per_step", "group_size", "rows_per_pass", "ranks"):
        fitting = nearest_fitting(shape, name)
        if fitting:
            options.append(f"{name} " + " or ".join(map(str, fitting)))
    return f" Nearest that fit: {'; '.join(options)}." if options else ""


def nearest_fitting(shape: StepShape, name: str) -> list[int]:
    """The nearest value below and above the present one with which the whole shape fits, the rest unchanged."""
    value = getattr(shape, name)
    floor, ceiling = value - 1, value + max(shape.ranks * shape.rows_per_pass, shape.group_size, value)
    if name == "conditions_per_step":
        floor, ceiling = min(floor, shape.conditions), min(ceiling, shape.conditions)
    elif shape.conditions < shape.conditions_per_step:
        return []
    below = next((v for v in range(floor, 0, -1) if _fits(shape, name, v)), None)
    above = next((v for v in range(value + 1, ceiling + 1) if _fits(shape, name, v)), None)
    return [v for v in (below, above) if v is not None]


def largest_fitting_rows(shape: StepShape, most: int) -> int | None:
    """The largest rows_per_pass up to `most` with which the shape fits; None below 1. One row always fits."""
    return next((rows for rows in range(most, 0, -1) if _fits(shape, "rows_per_pass", rows)), None)


def _fits(shape: StepShape, name: str, value: int) -> bool:
    """Whether the shape would fit with one number changed (asked without making it, which would raise)."""
    changed = object.__new__(StepShape)
    changed.__dict__.update({**shape.__dict__, name: value})
    return next(_violations(changed), None) is None
