"""What people see of a controller run: samples, preflight notes, the final report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from groupwise.core.types import Rollouts
from groupwise.workloads.base import EvaluationReport, Reporter
from groupwise.workloads.controller.conditions import value_of_choices
from groupwise.workloads.controller.policy.decide import choices_to_knobs
from groupwise.workloads.controller.policy.network import parameter_counts

if TYPE_CHECKING:
    from groupwise.workloads.controller.workload import ControllerWorkload


class ControllerReporter(Reporter):
    def __init__(self, workload: ControllerWorkload):
        self._workload = workload

    def describe_rollouts(self, rollouts: Rollouts) -> Sequence[Mapping[str, Any]]:
        rows, choices = rollouts.data["condition"], rollouts.data["choices"]
        medians, highs = (
            value_of_choices(tables, choices).tolist() for tables in self._workload.training.estimates(rows)
        )
        questions, knobs = self._workload.training.question_of(rows), choices_to_knobs(self._workload.options, choices)
        return [
            {
                "image": question.image or question.sample.name,
                "question": question.text,
                "knobs": vars(knobs[nth]),
                "answer": rollouts.data["answer"][nth],
                "right_answers": list(question.answers),
                "budget": str(self._workload.training.budget_of(row)),
                "budget_ms": float(self._workload.training.budget_ms[row]),
                "estimated_ms": medians[nth],
                "estimated_upper_ms": highs[nth],
                "nothing_fits": bool(self._workload.training.impossible[row]),
            }
            for nth, (row, question) in enumerate(zip(rows.tolist(), questions, strict=True))
        ]

    def preflight_notes(self) -> Sequence[str]:
        parts = parameter_counts(self._workload.policy)
        counted = ", ".join(f"{name} {count:,}" for name, count in parts.items())
        return [f"the controller has {sum(parts.values()):,} numbers: {counted}", *self._workload.task.notes]

    def final_report(self) -> EvaluationReport | None:
        """Measured answers to test questions, beside baselines; None where the task has no test questions."""
        from groupwise.workloads.controller.evaluate.report import evaluate_controller

        return evaluate_controller(self._workload) if self._workload.task.test is not None else None
