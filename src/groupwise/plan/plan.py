"""The plan of a run: predicted bytes, proposals and what to lower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    )
