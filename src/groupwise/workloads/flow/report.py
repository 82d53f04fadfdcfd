"""What people see of a flow run: samples, preflight notes, held-out clips."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from groupwise.core.types import Rollouts
from groupwise.workloads.base import Reporter

if TYPE_CHECKING:
    from groupwise.workloads.flow.workload import FlowWorkload


class FlowReporter(Reporter):
    def __init__(self, workload: FlowWorkload):
        self._workload = workload

    def describe_rollouts(self, rollouts: Rollouts) -> Sequence[Mapping[str, Any]]:
        return [
            {"prompt": condition.prompt, "name": condition.name, "trained_steps": steps}
            for condition, steps in zip(
                self._workload.conditions_of(rollouts), rollouts.data["steps"].tolist(), strict=True
            )
        ]

    def images(self) -> Mapping[str, Callable[[Path], None]]:
        """The first held-out clips."""
        numbers = torch.arange(min(self._workload.task.pictured, len(self._workload.task.held_out)))
        if not self._workload.task.pictures or not len(numbers):
            return {}
        shown, clips = [self._workload.task.held_out[number] for number in numbers], self._workload.generate(numbers)
        return {name: draw(shown, clips) for name, draw in self._workload.task.pictures.items()}

    def preflight_notes(self) -> Sequence[str]:
        trained = sum(weight.numel() for weight in self._workload.policy.parameters() if weight.requires_grad)
        every = sum(weight.numel() for weight in self._workload.policy.parameters())
        return [f"{trained:,} of the transformer's {every:,} numbers are trained", *self._workload.task.notes]
