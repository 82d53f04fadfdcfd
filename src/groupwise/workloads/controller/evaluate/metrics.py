"""From choices and timed answers to the values of eval.json: accuracy, latency, violations, overhead, estimates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.latency.records import PREFILL, STAGES
from groupwise.workloads.controller.config import BudgetScope, ControllerEvalConfig
from groupwise.workloads.controller.evaluate.exact import Choices, EvaluationSet
from groupwise.workloads.controller.evaluate.timing import CONTROLLER, AddedTime, AnswerTimer, TimedAnswer
from groupwise.workloads.controller.model.knobs import Knobs

MAIN_METHODS = ("controller", "lookup", "words", "ceiling")
"""Those of the chart, which are timed on more questions than the others."""


@dataclass(frozen=True)
class EvaluationResults:
    """Everything that was chosen and timed."""

    test_set: EvaluationSet
    choices: Mapping[str, Choices]
    """By method, on all test questions."""
    timer: AnswerTimer
    served_methods: Sequence[str]
    """Methods whose answers a controller serves; all others are timed with fixed knobs."""
    own_ms: Mapping[str, float]
    """What each method adds to an answer with fixed knobs."""
    added: AddedTime
    sample: Sequence[int]
    """Indices of the timed test questions, in random order."""
    config: ControllerEvalConfig

    @property
    def scope(self) -> BudgetScope:
        return self.test_set.conditions.config.scope

    def timed_questions(self, method: str) -> Sequence[int]:
        is_main = method in MAIN_METHODS
        return self.sample[: self.config.timed_answers if is_main else self.config.timed_answers_other_methods]

    def timed_answers(self, method: str, budget: int) -> list[TimedAnswer]:
        questions = self.timed_questions(method)
        if method in self.served_methods:
            return [self.timer.served(method, question, budget) for question in questions]
        return [self.timer.fixed(question, self.configuration(method, question, budget)) for question in questions]

    def latencies_ms(self, method: str, budget: int) -> list[float]:
        """Measured, with the method's own time."""
        own_ms = 0.0 if method in self.served_methods else self.own_ms[method]
        return [answer.latency_ms(self.scope) + own_ms for answer in self.timed_answers(method, budget)]

    def configuration(self, method: str, question: int, budget: int) -> int:
        """The configuration that a method chose. To drop other blocks takes as long, and is timed as the same."""
        return self.test_set.candidates[int(self.choices[method][question, budget])].configuration

    def accuracy(self, method: str) -> Float[Tensor, "questions budgets"]:
        """NaN on questions that some method has no accuracy for: all are compared on the same."""
        return self.test_set.accuracy_of(self.choices[method]).masked_fill(~self.graded[:, None], torch.nan)

    @cached_property
    def graded(self) -> Bool[Tensor, " questions"]:
        accuracies = [self.test_set.accuracy_of(choices) for choices in self.choices.values()]
        return ~torch.stack([accuracy.isnan().all(1) for accuracy in accuracies]).any(0)


def headline_metrics(results: EvaluationResults) -> dict[str, Any]:
    """Mean accuracy over all budgets, and violations of them."""
    budgets = range(results.test_set.num_budgets)
    return {
        "mean_accuracy": {name: float(results.accuracy(name).nanmean(1).nanmean()) for name in results.choices},
        "violations": {name: _violations(results, name, budgets) for name in results.choices},
        "own_ms": dict(results.own_ms),
        "tolerance": results.config.tolerance,
        "test_questions": len(results.test_set.questions),
        "test_pictures": len(set(results.test_set.pictures)),
        "timed_questions_per_budget": {name: len(results.timed_questions(name)) for name in results.choices},
    }


def by_budget(results: EvaluationResults) -> list[dict[str, Any]]:
    """Every method under every budget."""
    test_set = results.test_set
    infeasible = test_set.conditions.infeasible.view(-1, test_set.num_budgets)
    return [
        {
            "budget": str(budget),
            "budget_ms": float(test_set.budget_ms[:, index].mean()),
            "infeasible_rate": float(infeasible[:, index].double().mean()),
            **{name: _method_metrics(results, name, index) for name in results.choices},
        }
        for index, budget in enumerate(test_set.conditions.config.budgets)
    ]


def _method_metrics(results: EvaluationResults, name: str, budget: int) -> dict[str, Any]:
    violations = _violations(results, name, [budget])
    return {
        "accuracy": float(results.accuracy(name)[:, budget].nanmean()),
        **_quantiles(results.latencies_ms(name, budget)),
        "violation_rate": violations["rate"],
        "violation_interval": violations["interval"],
        "knobs": knob_shares(results, name, budget),
        "other_drop_order": other_drop_order(results, name, budget),
    }


def _quantiles(latencies_ms: Sequence[float]) -> dict[str, float]:
    return {"p50_ms": float(np.quantile(latencies_ms, 0.5)), "p95_ms": float(np.quantile(latencies_ms, 0.95))}


def _violations(results: EvaluationResults, name: str, budgets: Sequence[int]) -> dict[str, Any]:
    """Measured latencies beyond budget and tolerance; the rate with its 95 % Wilson interval."""
    from scipy.stats import binomtest

    allowed_ms = results.test_set.budget_ms * (1 + results.config.tolerance)
    late = [
        latency_ms > float(allowed_ms[question, budget])
        for budget in budgets
        for question, latency_ms in zip(results.timed_questions(name), results.latencies_ms(name, budget), strict=True)
    ]
    interval = binomtest(sum(late), len(late)).proportion_ci(confidence_level=0.95, method="wilson")
    return {
        "rate": sum(late) / len(late),
        "interval": [float(interval.low), float(interval.high)],
        "answers": len(late),
    }


def knob_shares(results: EvaluationResults, name: str, budget: int) -> dict[str, dict[str, float]]:
    """How often each option of each knob was chosen, over all test questions."""
    candidates = [results.test_set.candidates[index] for index in results.choices[name][:, budget].tolist()]
    chosen = [results.timer.configurations[candidate.configuration] for candidate in candidates]
    return {knob: _shares([getattr(knobs, knob) for knobs in chosen]) for knob in Knobs.__dataclass_fields__}


def other_drop_order(results: EvaluationResults, name: str, budget: int) -> float:
    """The fraction of questions for which blocks are dropped in another order than the controller's."""
    own = len(results.timer.configurations)
    return float((results.choices[name][:, budget] >= own).double().mean())


def _shares(values: Sequence[Any]) -> dict[str, float]:
    return {str(value): count / len(values) for value, count in Counter(values).most_common()}


def controller_overhead(results: EvaluationResults) -> dict[str, Any]:
    """The controller's own milliseconds, and how much longer its answers take than the same with fixed knobs."""
    budgets = range(results.test_set.num_budgets)
    answers = [answer for budget in budgets for answer in results.timed_answers("controller", budget)]
    controller_ms = np.array([answer.measured.stages_ms[CONTROLLER] for answer in answers])
    total_ms = np.array([answer.measured.total_ms for answer in answers])
    served = [answer.served for answer in answers if answer.served is not None]
    return {
        **_quantiles(controller_ms.tolist()),
        "stage_one_p50_ms": float(np.median([answer.stage_one_ms for answer in served])),
        "stage_two_p50_ms": float(np.median([answer.stage_two_ms for answer in served])),
        "share_of_answer": float(controller_ms.sum() / total_ms.sum()),
        "share_of_answer_p50": float(np.median(controller_ms / total_ms)),
        "overhead_p50_ms": results.added.difference_ms,
        "overhead_share_of_answer": results.added.difference_ms / float(np.median(total_ms)),
        "pairs": results.added.pairs,
        "answers": len(answers),
    }


def estimate_errors(results: EvaluationResults) -> dict[str, Any]:
    """Measured beside estimated latency by stage, for the controller's answers and for fixed knobs."""
    budgets = range(results.test_set.num_budgets)
    served = [answer for budget in budgets for answer in results.timed_answers("controller", budget)]
    return {"controller": _errors(served), "fixed_knobs": _errors(results.timer.all_fixed)}


def _errors(answers: Sequence[TimedAnswer]) -> dict[str, Any]:
    stages = {
        stage: {
            "measured_p50_ms": float(np.median([_stage_ms(answer, stage) for answer in answers])),
            "estimated_p50_ms": float(np.median([answer.estimated.stages_ms.get(stage, 0.0) for answer in answers])),
        }
        for stage in (*STAGES, CONTROLLER)
    }
    measured = np.array([answer.measured.total_ms for answer in answers])
    estimated = np.array([answer.estimated.total_ms for answer in answers])
    upper = np.array([answer.estimated.upper_ms for answer in answers])
    error = (measured - estimated) / estimated
    return {
        "stages": stages,
        "measured_p50_ms": float(np.median(measured)),
        "estimated_p50_ms": float(np.median(estimated)),
        "median_error": float(np.median(error)),
        "median_absolute_error": float(np.median(np.abs(error))),
        "p95_absolute_error": float(np.quantile(np.abs(error), 0.95)),
        "above_upper_quantile": float(np.mean(measured > upper)),
        "quantile": answers[0].estimated.quantile,
        "answers": len(answers),
    }


def _stage_ms(answer: TimedAnswer, stage: str) -> float:
    """Measured. Prefill includes the controller's time, as it does in the estimate."""
    stages = answer.measured.stages_ms
    return stages.get(stage, 0.0) + (stages.get(CONTROLLER, 0.0) if stage == PREFILL else 0.0)


def fixed_configuration_metrics(results: EvaluationResults) -> list[dict[str, Any]]:
    """Each distinct configuration by itself, from all answers that were timed with its knobs, if any."""
    rows = []
    for index in results.timer.distinct_configurations:
        answers = results.timer.answers_with(index)
        measured = _quantiles([answer.latency_ms(results.scope) for answer in answers]) if answers else {}
        rows.append(
            {
                "knobs": vars(results.timer.configurations[index]),
                "accuracy": float(results.test_set.accuracy[:, index].nanmean()),
                **measured,
                "estimated_ms": float(results.test_set.median_ms[:, index].mean()),
                "answers": len(answers),
            }
        )
    return rows


def uncontrolled_metrics(results: EvaluationResults) -> dict[str, Any]:
    """The full configuration always, whatever the budget; and the controller under budgets that leave it free."""
    test_set, full = results.test_set, results.timer.configurations.index(results.timer.task.executor.options.full)
    answers = results.timer.answers_with(full)
    free = (test_set.upper_ms[:, full, None] <= test_set.budget_ms).all(0).tolist()
    accuracy = results.accuracy("controller").nanmean(0).tolist()
    labels = [budget.label for budget in test_set.conditions.config.budgets]
    return {
        "accuracy": float(test_set.accuracy[results.graded, full].nanmean()),
        **_quantiles([answer.latency_ms(results.scope) for answer in answers]),
        "controller": {label: value for label, value, is_free in zip(labels, accuracy, free, strict=True) if is_free},
    }
