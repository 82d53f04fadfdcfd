"""FlowReporter: what people see of a flow run: sampled rollouts, preflight notes, images of held-out clips."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from groupwise.core.types import Rollouts
from groupwise.workloads.base import EvaluationReport, Reporter
from groupwise.workloads.flow.evaluate import generate_held_out

if TYPE_CHECKING:
    from groupwise.workloads.flow.workload import FlowWorkload


class FlowReporter(Reporter):
    def __init__(self, workload: FlowWorkload):
        self._workload = workload

    def describe_rollouts(self, rollouts: Rollouts) -> Sequence[Mapping[str, Any]]:
        conditions, steps = self._workload.conditions_of(rollouts), rollouts.data["steps"].tolist()
        return [
            {"prompt": condition.prompt, "name": condition.name, "trained_steps": trained}
            for condition, trained in zip(conditions, steps, strict=True)
        ]

    def images(self) -> Mapping[str, Callable[[Path], None]]:
        """The first held-out clips."""
        task = self._workload.task
        shown = task.held_out[: task.num_images]
        if not task.images or not shown:
            return {}
        clips = generate_held_out(self._workload, torch.arange(len(shown)))
        return {name: draw(shown, clips) for name, draw in task.images.items()}

    def preflight_notes(self) -> Sequence[str]:
        parameters = list(self._workload.policy.parameters())
        trained = sum(weight.numel() for weight in parameters if weight.requires_grad)
        total = sum(weight.numel() for weight in parameters)
        return [f"{trained:,} of the transformer's {total:,} parameters are trained", *self._workload.task.notes]

    def final_report(self) -> EvaluationReport | None:
        """The task's own, where it has one."""
        compare = self._workload.task.final_report
        return compare(self._workload) if compare else None
