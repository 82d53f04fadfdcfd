"""The plan of a run: predicted bytes, proposals and what to lower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from groupwise.plan.parts import Job, Stages
from groupwise.plan.settings import (
    AGGRESSIVE,
    RECOMMENDED,
    Lowering,
    Predict,
    Setting,
    check_room,
    divisors,
    lower_first,
    propose,
    setting,
)


class MemoryModel(Protocol):
    """What a workload knows of its memory: all that a plan asks for."""

    def stages(self, job: Job) -> Stages:
        """Bytes by part at the fullest moment of rollout and update, on one rank."""
        ...

    def smaller(self) -> Sequence[tuple[str, MemoryModel, bool]]:
        """What else can be lowered: (what, how it would be, whether the result changes), each on top of the last."""
        ...


@dataclass(frozen=True)
class Plan:
    device: int
    current: Setting
    recommended: Setting
    aggressive: Setting
    lower: Sequence[Lowering]
    doubled: Mapping[str, int]
    """The peak if a number that is a loop over passes were doubled: hardly another one."""

    @property
    def fits(self) -> bool:
        return self.current.fits

    @property
    def settings(self) -> dict[str, Setting]:
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
            "nearest_that_divide": divisors(self.current.shape),
        }


def make_plan(model: MemoryModel, job: Job, device: int) -> Plan:
    predict: Predict = model.stages
    check_room(job, predict, device)
    smaller = [(what, changed.stages, changes) for what, changed, changes in model.smaller()]
    return Plan(
        device,
        setting(job, predict, device),
        propose(job, predict, device, RECOMMENDED),
        propose(job, predict, device, AGGRESSIVE),
        lower_first(job, predict, smaller),
        {name: predict(_doubled(job, name)).with_margin().peak for name in ("conditions_per_step", "group_size")},
    )


def _doubled(job: Job, name: str) -> Job:
    """Always a shape that fits: what divided before divides twice as much, and the dataset is as large as need be."""
    shape = replace(job.shape, conditions=max(job.shape.conditions, 4 * job.shape.conditions_per_step))
    return replace(job, shape=replace(shape, **{name: 2 * getattr(shape, name)}))
