"""The arithmetic of a step: what fits, and the nearest values that fit. No torch, so `--help` is fast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from groupwise.core.errors import UserError

PLACEMENTS = ("whole", "spread", "shuffled")
UNKNOWN_DATASET_SIZE = 10**12
"""Conditions of a dataset that is not known yet: never too few, and the most that a dataset may have."""
MAX_ROLLOUTS_PER_STEP = 1 << 20
"""Each rank computes the placement of all rollouts of a step, about 60 bytes each, before it runs one."""
MAX_RANKS = 1 << 20
BUCKET_NUMEL = 1 << 22
"""Elements per all-reduce when gradients are summed over the ranks: small tensors share one bucket."""
_MAX_ROWS_PER_PASS = 1 << 31
_SEARCHED = 8_192
"""Values on each side among which the nearest one that fits is searched."""


@dataclass(frozen=True)
class StepShape:
    """How many conditions, rollouts, ranks and passes a step has. What cannot work is refused on construction."""

    conditions: int
    """Conditions in the dataset: an epoch visits each of them once."""
    conditions_per_step: int
    group_size: int
    ranks: int = 1
    rows_per_pass: int = 1
    """Most rows that go through the model together. The last pass may be smaller."""
    placement: str = "whole"

    def __post_init__(self) -> None:
        for violation in _limit_violations(**vars(self)):
            raise UserError(violation)
        for violation in _violations(**vars(self)):
            raise UserError(violation + _suggestion(vars(self)))

    @property
    def rollouts_per_step(self) -> int:
        return self.conditions_per_step * self.group_size

    @property
    def rollouts_per_rank(self) -> int:
        return self.rollouts_per_step // self.ranks

    @property
    def passes(self) -> int:
        return -(-self.rollouts_per_rank // self.rows_per_pass)

    @property
    def largest_pass(self) -> int:
        """Rows of the largest pass: rows_per_pass, or all rows of a rank where these are fewer."""
        return min(self.rows_per_pass, self.rollouts_per_rank)

    @property
    def steps_per_epoch(self) -> float:
        """Not rounded: a step that begins in one epoch may end in the next."""
        return self.conditions / self.conditions_per_step

    def summary(self) -> str:
        """The arithmetic in one line: 8 conditions x 4 members = 32 rollouts = 8 ranks x 2 passes x 2 rows."""
        last_pass = self.rollouts_per_rank - (self.passes - 1) * self.largest_pass
        uneven = f" (the last pass has {last_pass})" if last_pass < self.largest_pass else ""
        return (
            f"{self.conditions_per_step} conditions x {self.group_size} members = {self.rollouts_per_step} rollouts ="
            f" {self.ranks} ranks x {self.passes} passes x {self.largest_pass} rows{uneven}"
        )


def nearest_fitting(shape: StepShape, name: str) -> list[int]:
    """The nearest value below and above the current one with which the whole shape fits, the rest unchanged."""
    return _nearest_fitting(vars(shape), name)


def even_pass_sizes(rollouts: int) -> Iterator[int]:
    """Values of rows_per_pass that cut `rollouts` into 1, 2, 3, ... passes of nearly equal size, each value once."""
    rows = rollouts
    while rows >= 1:
        passes = -(-rollouts // rows)
        yield -(-rollouts // passes)
        rows = -(-rollouts // passes) - 1


def _limit_violations(
    conditions: int, conditions_per_step: int, group_size: int, ranks: int, rows_per_pass: int, placement: str
) -> Iterator[str]:
    """Numbers beyond what a step can have, checked before anything is computed with them."""
    most = {
        "conditions": (conditions, UNKNOWN_DATASET_SIZE),
        "ranks": (ranks, MAX_RANKS),
        "rows_per_pass": (rows_per_pass, _MAX_ROWS_PER_PASS),
    }
    for name, (value, limit) in most.items():
        if value > limit:
            yield f"{name} is {_shown(value)}: it must be at most {limit:,}."
    rollouts = conditions_per_step * group_size
    if conditions_per_step > 0 and rollouts > MAX_ROLLOUTS_PER_STEP:
        yield (
            f"conditions_per_step {_shown(conditions_per_step)} x group_size {_shown(group_size)} ="
            f" {_shown(rollouts)} rollouts: a step has at most {MAX_ROLLOUTS_PER_STEP:,}, because each rank computes"
            " the placement of all of them. Take fewer of either."
        )


def _shown(value: int) -> str:
    """A number as it was given, unless its digits alone would fill the message."""
    return str(value) if abs(value) < 10**40 else "a number of more than 40 digits"


def _violations(
    conditions: int, conditions_per_step: int, group_size: int, ranks: int, rows_per_pass: int, placement: str
) -> Iterator[str]:
    """The rules that these numbers break, the simplest first, each as a sentence."""
    counts = {"conditions": conditions, "conditions_per_step": conditions_per_step}
    counts |= {"ranks": ranks, "rows_per_pass": rows_per_pass}
    for name, count in counts.items():
        if count < 1:
            yield f"{name} is {count}: it must be at least 1."
            return
    if group_size < 2:
        yield (
            f"group_size is {group_size}: a group's rollouts are compared with each other, so it needs at least 2"
            " members to learn anything. Take 2 or more (8 is common)."
        )
        return
    yield from _dataset_violations(conditions, conditions_per_step)
    yield from _placement_violations(conditions_per_step, group_size, ranks, placement)


def _dataset_violations(conditions: int, per_step: int) -> Iterator[str]:
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


def _placement_violations(per_step: int, group_size: int, ranks: int, placement: str) -> Iterator[str]:
    if placement == "whole" and per_step % ranks:
        yield (
            f"conditions_per_step is {per_step}, which does not divide over {ranks} ranks: placement 'whole' keeps each"
            " group on one rank."
        )
    if per_step * group_size % ranks:
        yield (
            f"conditions_per_step {per_step} x group_size {group_size} = {per_step * group_size} rollouts, which"
            f" {ranks} ranks cannot share evenly."
        )


def _suggestion(numbers: Mapping[str, Any]) -> str:
    """The nearest values that fit, one number changed at a time."""
    options = []
    for name in ("conditions_per_step", "group_size", "rows_per_pass", "ranks"):
        fitting = _nearest_fitting(numbers, name)
        if fitting:
            options.append(f"{name} " + " or ".join(map(str, fitting)))
    return f" Nearest that fit: {'; '.join(options)}." if options else ""


def _nearest_fitting(numbers: Mapping[str, Any], name: str) -> list[int]:
    value, conditions = numbers[name], numbers["conditions"]
    floor, ceiling = value - 1, value + max(numbers["ranks"], numbers["group_size"], value)
    if name == "conditions_per_step":
        floor, ceiling = min(floor, conditions), min(ceiling, conditions)
    elif conditions < numbers["conditions_per_step"]:
        return []
    floor_end, ceiling = max(0, floor - _SEARCHED), min(ceiling, value + _SEARCHED)
    below = next((v for v in range(floor, floor_end, -1) if _fits(numbers, name, v)), None)
    above = next((v for v in range(value + 1, ceiling + 1) if _fits(numbers, name, v)), None)
    return [v for v in (below, above) if v is not None]


def _fits(numbers: Mapping[str, Any], name: str, value: int) -> bool:
    changed = {**numbers, name: value}
    return next(chain(_limit_violations(**changed), _violations(**changed)), None) is None
