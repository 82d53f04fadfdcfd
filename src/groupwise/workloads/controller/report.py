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
        conditions = self._workload.training
        medians, uppers = (value_of_choices(tables, choices).tolist() for tables in conditions.estimates(rows))
        questions, knobs = conditions.question_of(rows), choices_to_knobs(self._workload.options, choices)
        return [
            {
                "image": question.image or question.sample.name,
                "question": question.text,
                "knobs": vars(knobs[index]),
                "answer": rollouts.data["answer"][index],
                "right_answers": list(question.answers),
                "budget": str(conditions.budget_of(row)),
                "budget_ms": float(conditions.budget_ms[row]),
                "estimated_ms": medians[index],
                "estimated_upper_ms": uppers[index],
                "infeasible": bool(conditions.infeasible[row]),
            }
            for index, (row, question) in enumerate(zip(rows.tolist(), questions, strict=True))
        ]

    def preflight_notes(self) -> Sequence[str]:
        counts = parameter_counts(self._workload.policy)
        by_part = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        return [f"the controller has {sum(counts.values()):,} parameters: {by_part}", *self._workload.task.notes]

    def start_warnings(self) -> Sequence[str]:
        return self._workload.task.warnings

    def final_report(self) -> EvaluationReport | None:
        """Accuracy and measured latency on test questions, beside baselines; None where the task has no test split."""
        from groupwise.workloads.controller.evaluate.report import evaluate_controller

        return evaluate_controller(self._workload) if self._workload.task.test_questions is not None else None
