"""What the evaluation found, as JSON values.
Shares with their uncertainty, and the share of a gap that is closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.latency.records import PREFILL, STAGES
from groupwise.workloads.controller.config import ControllerEvalConfig
from groupwise.workloads.controller.evaluate.baselines import Choices
from groupwise.workloads.controller.evaluate.exact import EvaluationSet
from groupwise.workloads.controller.evaluate.timing import CONTROLLER, AnswerTimer, TimedAnswer
from groupwise.workloads.controller.model.knobs import Knobs

_NORMAL_95 = 1.959964


def wilson(hits: int, trials: int, z: float = _NORMAL_95) -> tuple[float, float]:
    """The 95 % confidence interval of a share (Wilson, 1927): sensible also at 0 of n, where others have no width."""
    if not trials:
        return 0.0, 1.0
    share, square = hits / trials, z * z / trials
    centre = (share + square / 2) / (1 + square)
    reach = z * sqrt(share * (1 - share) / trials + square / (4 * trials)) / (1 + square)
    return max(0.0, centre - reach), min(1.0, centre + reach)


def gap_closed(floor: float, reached: float, ceiling: float) -> float | None:
    """How much of the way from the floor to the ceiling was made; None where there is no way to go."""
    return (reached - floor) / (ceiling - floor) if ceiling > floor else None


def gap_interval(
    floor: Float[Tensor, " questions"],
    reached: Float[Tensor, " questions"],
    ceiling: Float[Tensor, " questions"],
    images: Sequence[str],
    *,
    draws: int = 2000,
) -> tuple[float, float] | None:
    """The 95 % bootstrap interval of the gap closed. Images are drawn, not questions: those about one go together."""
    number = {image: nth for nth, image in enumerate(dict.fromkeys(images))}
    owner = torch.tensor([number[image] for image in images])
    columns = torch.stack([floor, reached, ceiling], dim=1).double()
    sums = torch.zeros(len(number), 3, dtype=torch.float64).index_add_(0, owner, columns)
    source = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(number), (draws, len(number)), generator=source)
    low, got, high = sums[drawn].sum(1).unbind(1)
    gaps = ((got - low) / (high - low))[high > low]
    if len(gaps) < draws / 2:
        return None
    bounds = gaps.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return bounds[0], bounds[1]


def interval_too_wide(interval: Sequence[float] | None) -> bool:
    """Whether the interval is so wide that the share says nothing: the gap is smaller than its noise."""
    return interval is None or interval[1] - interval[0] > 1


@dataclass(frozen=True)
class EvaluationResults:
    """Everything that was chosen and timed."""

    exam: EvaluationSet
    chosen: Mapping[str, Choices]
    """By method, on all test questions."""
    clock: AnswerTimer
    served: Sequence[str]
    """Methods whose answers are given by a controller, its own time included."""
    sample: Sequence[int]
    """Questions whose answers were timed, in an order without meaning."""
    config: ControllerEvalConfig

    def timed(self, method: str) -> Sequence[int]:
        """The questions whose answers by this method were timed."""
        first = method in ("controller", "lookup")
        return self.sample[: self.config.timed_answers if first else self.config.timed_answers_of_others]

    def answers(self, method: str, budget: int) -> list[TimedAnswer]:
        if method in self.served:
            return [self.clock.served(method, question, budget) for question in self.timed(method)]
        chosen = self.chosen[method]
        return [self.clock.given(question, int(chosen[question, budget])) for question in self.timed(method)]


def headline_metrics(found: EvaluationResults) -> dict[str, Any]:
    """The headline: mean accuracy over the budgets, and the shares of the gaps that are closed."""
    scores = {name: found.exam.score(choices).nanmean(1) for name, choices in found.chosen.items()}
    judged = ~torch.stack(list(scores.values())).isnan().any(0)  # for every method: all are compared on the same ones
    scores = {name: score[judged] for name, score in scores.items()}
    means = {name: float(score.mean()) for name, score in scores.items()}
    asked = [found.exam.questions[number] for number in judged.nonzero()[:, 0].tolist()]
    images = [question.image or question.sample.name for question in asked]
    closed = {
        key: {
            "share": gap_closed(means["lookup"], means["controller"], means[ceiling]),
            "interval": gap_interval(scores["lookup"], scores["controller"], scores[ceiling], images),
        }
        for key, ceiling in (("kind", "kind_oracle"), ("sample", "oracle"))
    }
    return {
        "gap_closed": closed["kind"]["share"],
        "gap_closed_interval": closed["kind"]["interval"],
        "gap_closed_per_sample": closed["sample"]["share"],
        "gap_closed_per_sample_interval": closed["sample"]["interval"],
        "mean_accuracy": means,
        "violations": {name: _violations(found, name, range(found.exam.budget_ms.shape[1])) for name in found.chosen},
        "tolerance": found.config.tolerance,
        "test_questions": len(found.exam.questions),
        "timed_questions_per_budget": {name: len(found.timed(name)) for name in found.chosen},
    }


def by_budget(found: EvaluationResults) -> list[dict[str, Any]]:
    """For every budget, every method: how right, how fast, how often too slow, with which knobs."""
    return [
        {
            "budget": str(budget),
            "budget_ms": float(found.exam.budget_ms[:, nth].mean()),
            "nothing_fits_rate": float(
                found.exam.conditions.impossible.view(-1, _budgets(found))[:, nth].double().mean()
            ),
            **{name: _method_metrics(found, name, nth) for name in found.chosen},
        }
        for nth, budget in enumerate(found.exam.conditions.config.budgets)
    ]


def _budgets(found: EvaluationResults) -> int:
    return found.exam.budget_ms.shape[1]


def _method_metrics(found: EvaluationResults, name: str, budget: int) -> dict[str, Any]:
    spent = [answer.spent_ms(_span(found)) for answer in found.answers(name, budget)]
    counted = _violations(found, name, [budget])
    return {
        "accuracy": float(found.exam.score(found.chosen[name])[:, budget].nanmean()),
        "p50_ms": float(np.quantile(spent, 0.5)),
        "p95_ms": float(np.quantile(spent, 0.95)),
        "violation_rate": counted["rate"],
        "violation_interval": counted["interval"],
        "knobs": knob_shares(found, name, budget),
    }


def _violations(found: EvaluationResults, name: str, budgets: Sequence[int]) -> dict[str, Any]:
    """Measured times beyond budget and tolerance, with Wilson's interval."""
    late = [
        answer.spent_ms(_span(found)) > float(found.exam.budget_ms[question, budget]) * (1 + found.config.tolerance)
        for budget in budgets
        for question, answer in zip(found.timed(name), found.answers(name, budget), strict=True)
    ]
    return {"rate": sum(late) / len(late), "interval": wilson(sum(late), len(late)), "answers": len(late)}


def _span(found: EvaluationResults) -> Any:
    return found.exam.conditions.config.span


def knob_shares(found: EvaluationResults, name: str, budget: int) -> dict[str, dict[str, float]]:
    """How often each option of each knob was chosen, over all test questions."""
    every = list(found.clock.task.executor.options.configurations())
    chosen = [every[number] for number in found.chosen[name][:, budget].tolist()]
    return {knob: _shares([getattr(each, knob) for each in chosen]) for knob in Knobs.__dataclass_fields__}


def _shares(values: Sequence[Any]) -> dict[str, float]:
    return {str(value): count / len(values) for value, count in Counter(values).most_common()}


def controller_overhead(found: EvaluationResults) -> dict[str, Any]:
    """The controller's own milliseconds, and what being controlled adds to an answer with the same knobs in all."""
    every = list(found.clock.task.executor.options.configurations())
    answers, added, shares = [], [], []
    for budget in range(_budgets(found)):
        for question, answer in zip(found.timed("controller"), found.answers("controller", budget), strict=True):
            answers.append(answer)
            number = every.index(answer.knobs)
            if found.clock.knows(question, number):  # rounding may tip a choice between two that are equally likely
                added.append(answer.measured.total_ms - found.clock.given(question, number).measured.total_ms)
            shares.append(answer.measured.stages_ms[CONTROLLER] / answer.measured.total_ms)
    own = [answer.measured.stages_ms[CONTROLLER] for answer in answers]
    served = [answer.served for answer in answers if answer.served is not None]
    return {
        "p50_ms": float(np.quantile(own, 0.5)),
        "p95_ms": float(np.quantile(own, 0.95)),
        "stage_one_p50_ms": float(np.quantile([each.stage_one_ms for each in served], 0.5)),
        "stage_two_p50_ms": float(np.quantile([each.stage_two_ms for each in served], 0.5)),
        "share_of_answer": float(np.sum(own) / np.sum([answer.measured.total_ms for answer in answers])),
        "share_of_answer_p50": float(np.quantile(shares, 0.5)),
        "added_p50_ms": float(np.quantile(added, 0.5)),
        "answers": len(answers),
    }


def estimate_errors(found: EvaluationResults) -> dict[str, Any]:
    """Measured beside estimated, by stage, for answers as the controller gives them and for knobs that are given."""
    controlled = [answer for budget in range(_budgets(found)) for answer in found.answers("controller", budget)]
    return {"controlled": _errors(controlled), "given_knobs": _errors(found.clock.all_given)}


def _spent_ms(answer: TimedAnswer, stage: str) -> float:
    """Measured. Prefill is told with the controller's part, as it is profiled and estimated."""
    stages = answer.measured.stages_ms
    return stages.get(stage, 0.0) + (stages.get(CONTROLLER, 0.0) if stage == PREFILL else 0.0)


def _errors(answers: Sequence[TimedAnswer]) -> dict[str, Any]:
    stages = {
        stage: {
            "measured_p50_ms": float(np.quantile([_spent_ms(a, stage) for a in answers], 0.5)),
            "estimated_p50_ms": float(np.quantile([a.estimated.stages_ms.get(stage, 0.0) for a in answers], 0.5)),
        }
        for stage in (*STAGES, CONTROLLER)
    }
    measured = np.array([answer.measured.total_ms for answer in answers])
    estimated = np.array([answer.estimated.total_ms for answer in answers])
    high = np.array([answer.estimated.upper_ms for answer in answers])
    error = (measured - estimated) / estimated
    return {
        "stages": stages,
        "measured_p50_ms": float(np.median(measured)),
        "estimated_p50_ms": float(np.median(estimated)),
        "median_error": float(np.median(error)),
        "median_absolute_error": float(np.median(np.abs(error))),
        "p95_absolute_error": float(np.quantile(np.abs(error), 0.95)),
        "above_high_quantile": float(np.mean(measured > high)),
        "quantile": answers[0].estimated.quantile,
        "answers": len(answers),
    }


def fixed_configuration_metrics(
    found: EvaluationResults, questions_of: Mapping[int, Sequence[int]]
) -> list[dict[str, Any]]:
    """Every configuration that computes something of its own, by itself."""
    every = list(found.clock.task.executor.options.configurations())
    rows = []
    for number, questions in questions_of.items():
        answers = [found.clock.given(question, number) for question in questions]
        spent = [answer.spent_ms(_span(found)) for answer in answers]
        rows.append(
            {
                "knobs": vars(every[number]),
                "accuracy": float(found.exam.accuracy[:, number].nanmean()),
                "p50_ms": float(np.quantile(spent, 0.5)),
                "p95_ms": float(np.quantile(spent, 0.95)),
                "estimated_ms": float(found.exam.median_ms[:, number].mean()),
                "answers": len(answers),
            }
        )
    return rows
