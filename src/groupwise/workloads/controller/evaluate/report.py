"""From a trained controller to everything it should be judged by."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

from groupwise.workloads.base import EvaluationReport
from groupwise.workloads.controller.evaluate import baselines as methods
from groupwise.workloads.controller.evaluate.baselines import Choices, train_imitation
from groupwise.workloads.controller.evaluate.exact import EvaluationSet, build_evaluation_set
from groupwise.workloads.controller.evaluate.metrics import (
    EvaluationResults,
    by_budget,
    controller_overhead,
    estimate_errors,
    fixed_configuration_metrics,
    headline_metrics,
)
from groupwise.workloads.controller.evaluate.render import draw, tables
from groupwise.workloads.controller.evaluate.timing import AnswerTimer, sample_questions
from groupwise.workloads.controller.latency.estimates import KnobLatencyEstimator
from groupwise.workloads.controller.latency.source import current_slowdown, recalibrate
from groupwise.workloads.controller.policy.decide import Controller
from groupwise.workloads.controller.serving.server import ServedTimer
from groupwise.workloads.controller.workload import ControllerWorkload

PICTURE = "eval.png"
_IMITATED = 3200
"""Training questions that imitation is shown, at most: every one of them has to be looked at again."""


def evaluate_controller(workload: ControllerWorkload) -> EvaluationReport:
    """Choose on the questions to choose on, judge on the test questions, time a sample of the answers."""
    profiled = workload.task.estimator
    workload, pace = recalibrate_if_drifted(workload)
    task, config = workload.task, workload.config.eval
    assert task.test is not None, "a task without test questions has no final evaluation"
    choose = build_evaluation_set(workload, task.choose() if task.choose else task.held_out)
    exam = build_evaluation_set(workload, task.test())
    servers = controllers(workload)
    chosen = choices(servers, choose, exam, rows_per_pass=workload.row_limits["eval_rows"])
    clock = AnswerTimer(task, exam, servers)
    wanted = max(config.timed_answers, config.timed_answers_of_others)
    found = EvaluationResults(exam, chosen, clock, tuple(servers), sample_questions(exam, wanted), config)
    repeated = _questions_of_singles(found)
    _time(found, repeated)
    metrics = {
        **headline_metrics(found),
        "choose_questions": len(choose.questions),
        "pace_since_profile": pace,
        "recalibrated": task.estimator is not profiled,
        "budgets": by_budget(found),
        "controller_time": controller_overhead(found),
        "estimate": estimate_errors(found),
        "singles": fixed_configuration_metrics(found, repeated),
    }
    return EvaluationReport(metrics, tables(metrics), {PICTURE: partial(draw, metrics)})


def recalibrate_if_drifted(workload: ControllerWorkload) -> tuple[ControllerWorkload, float | None]:
    """The same with an estimator that is right for how fast the machine is now, and how many times as long answers took
    as was estimated; None where nothing was profiled, or nothing is to be measured.

    An estimator that still holds is kept: it has seen more than a short look has.
    """
    task, answers = workload.task, workload.config.eval.recalibration_answers
    if not answers or not isinstance(task.estimator, KnobLatencyEstimator):
        return workload, None
    asked = random.Random(0).sample(task.questions, min(answers, len(task.questions)))
    samples = [question.sample for question in asked]
    timer = ServedTimer(task.executor)
    pace, holds = current_slowdown(task.estimator, task.executor, samples, timer=timer)
    if holds:
        return workload, pace
    estimator, pace = recalibrate(task.estimator, task.executor, samples, timer=timer, answers=answers)
    judged = copy(workload)
    judged.task = replace(task, estimator=estimator)
    return judged, pace


def controllers(workload: ControllerWorkload) -> dict[str, Controller]:
    """The trained one, and the one that imitates the oracle."""
    found, steps = {"controller": workload.controller}, workload.config.eval.imitation_steps
    if steps:
        training = build_evaluation_set(workload, workload.task.questions[:_IMITATED])
        found["imitation"] = train_imitation(workload, training, steps=steps, seed=workload.config.policy_seed)
    return found


def choices(
    servers: Mapping[str, Controller], choose: EvaluationSet, exam: EvaluationSet, *, rows_per_pass: int = 64
) -> dict[str, Choices]:
    """What every method takes for every question and budget of the exam."""
    return {
        **{name: methods.controlled(server, exam, rows_per_pass) for name, server in servers.items()},
        "lookup": methods.lookup(choose, exam),
        "kind_oracle": methods.kind_oracle(choose, exam),
        "oracle": methods.oracle(exam),
        "random": methods.random_choice(exam),
        "dearest": methods.dearest(exam),
        "cheapest": methods.cheapest(exam),
    }


def _questions_of_singles(found: EvaluationResults) -> dict[int, Sequence[int]]:
    """For every single configuration some of the timed questions, in turn."""
    timed, runs = found.sample, min(found.config.runs_of_singles, len(found.sample))
    return {
        number: [timed[(nth * runs + run) % len(timed)] for run in range(runs)]
        for nth, number in enumerate(found.clock.distinct_configurations)
    }


def _time(found: EvaluationResults, questions_of_singles: Mapping[int, Sequence[int]]) -> None:
    """Everything in one go. What the controller chose is timed with given knobs too, to see what choosing adds."""
    budgets = range(found.exam.budget_ms.shape[1])
    for name, chosen in found.chosen.items():
        if name in found.served:
            found.clock.ask_served(name, ((question, budget) for question in found.timed(name) for budget in budgets))
        if name == "controller" or name not in found.served:
            most = found.config.timed_answers_of_others if name == "controller" else None
            asked = found.timed(name)[:most]
            found.clock.ask_with((question, int(chosen[question, budget])) for question in asked for budget in budgets)
    found.clock.ask_with((question, number) for number, each in questions_of_singles.items() for question in each)
    found.clock.run()
