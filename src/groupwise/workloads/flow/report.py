"""FlowReporter: what people see of a flow run: sampled rollouts, preflight notes, images of held-out clips."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from groupwise.core.types import Rollouts
from groupwise.workloads.base import EvaluationReport, Reporter
from groupwise.workloads.flow.evaluate import generate_clips
from groupwise.workloads.flow.sampling.schedule import trained_steps

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
        """Clips of the first held-out conditions, or of the first training conditions where none are held out."""
        workload, task = self._workload, self._workload.task
        if not task.images:
            return {}
        conditioning = workload.held_out_conditioning if task.held_out else workload.conditioning
        shown = (task.held_out or task.conditions)[: task.num_images]
        clips = generate_clips(workload, conditioning, torch.arange(len(shown)))
        return {name: draw(shown, clips) for name, draw in task.images.items()}

    def start_warnings(self) -> Sequence[str]:
        """Parts of the policy that no window reaches."""
        sampling = self._workload.config.sampling
        return [
            f"{name} is never trained: it takes none of the first {len(trained_steps(sampling))} of"
            f" {sampling.num_inference_steps} denoising steps, and no others are in the window."
            " --workload.sampling.window.share 1 trains all but the last."
            for name in self._workload.never_trained()
        ]

    def preflight_notes(self) -> Sequence[str]:
        parameters = list(self._workload.policy.parameters())
        trained = sum(weight.numel() for weight in parameters if weight.requires_grad)
        total = sum(weight.numel() for weight in parameters)
        return [f"{trained:,} of the transformer's {total:,} parameters are trained", *self._workload.task.notes]

    def final_report(self) -> EvaluationReport | None:
        """The task's own, where it has one."""
        compare = self._workload.task.final_report
        return compare(self._workload) if compare else None
