"""The final evaluation of a trained controller, top to bottom."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

from groupwise.workloads.base import EvaluationReport
from groupwise.workloads.controller.evaluate import baselines
from groupwise.workloads.controller.evaluate.exact import Choices, EvaluationSet, build_evaluation_set
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

IMAGE_FILE = "eval.png"
_IMITATION_QUESTIONS = 3200
"""Training questions for imitation, at most: each is answered under every configuration."""


def evaluate_controller(workload: ControllerWorkload) -> EvaluationReport:
    """Choose baselines on the selection questions, evaluate on the test questions, time a sample of the answers."""
    profiled = workload.task.estimator
    workload, slowdown = recalibrate_if_drifted(workload)
    task, config = workload.task, workload.config.eval
    assert task.test_questions is not None, "a task without test questions has no final evaluation"
    selection = task.selection_questions() if task.selection_questions else task.held_out
    selection_set = build_evaluation_set(workload, selection)
    test_set = build_evaluation_set(workload, task.test_questions())
    controllers = _controllers(workload)
    choices = _choices(controllers, selection_set, test_set, rows_per_pass=workload.eval_rows)
    timer = AnswerTimer(task, test_set, controllers)
    sample = sample_questions(test_set, max(config.timed_answers, config.timed_answers_other_methods))
    results = EvaluationResults(test_set, choices, timer, tuple(controllers), sample, config)
    fixed = _questions_of_configurations(results)
    _time_answers(results, fixed)
    metrics = {
        **headline_metrics(results),
        "selection_questions": len(selection_set.questions),
        "slowdown_since_profile": slowdown,
        "recalibrated": task.estimator is not profiled,
        "budgets": by_budget(results),
        "controller_overhead": controller_overhead(results),
        "estimate": estimate_errors(results),
        "fixed_configurations": fixed_configuration_metrics(results, fixed),
    }
    return EvaluationReport(metrics, tables(metrics), {IMAGE_FILE: partial(draw, metrics)})


def recalibrate_if_drifted(workload: ControllerWorkload) -> tuple[ControllerWorkload, float | None]:
    """The workload with an estimator that fits the machine's current speed, and the slowdown since it was profiled.

    An estimator that is still calibrated is kept: it has seen more answers than the quick check. None where nothing was
    profiled, or recalibration is off.
    """
    task, answers = workload.task, workload.config.eval.recalibration_answers
    if not answers or not isinstance(task.estimator, KnobLatencyEstimator):
        return workload, None
    questions = random.Random(0).sample(task.questions, min(answers, len(task.questions)))
    samples = [question.sample for question in questions]
    timer = ServedTimer(task.executor)
    slowdown, is_calibrated = current_slowdown(task.estimator, task.executor, samples, timer=timer)
    if is_calibrated:
        return workload, slowdown
    estimator, slowdown = recalibrate(task.estimator, task.executor, samples, timer=timer, answers=answers)
    recalibrated = copy(workload)
    recalibrated.task = replace(task, estimator=estimator)
    return recalibrated, slowdown


def _controllers(workload: ControllerWorkload) -> dict[str, Controller]:
    """The trained controller, and one that imitates the per-question oracle."""
    controllers, steps = {"controller": workload.controller}, workload.config.eval.imitation_steps
    if steps:
        training_set = build_evaluation_set(workload, workload.task.questions[:_IMITATION_QUESTIONS])
        seed = workload.config.policy_seed
        controllers["imitation"] = baselines.train_imitation(workload, training_set, steps=steps, seed=seed)
    return controllers


def _choices(
    controllers: Mapping[str, Controller], selection_set: EvaluationSet, test_set: EvaluationSet, *, rows_per_pass: int
) -> dict[str, Choices]:
    """Every method's configuration for every test question and budget."""
    return {
        **{
            name: baselines.controller_choices(controller, test_set, rows_per_pass)
            for name, controller in controllers.items()
        },
        "lookup": baselines.lookup_table(selection_set, test_set),
        "question_type_oracle": baselines.question_type_oracle(selection_set, test_set),
        "per_question_oracle": baselines.per_question_oracle(test_set),
        "random_feasible": baselines.random_feasible(test_set),
        "slowest_feasible": baselines.slowest_feasible(test_set),
        "cheapest": baselines.cheapest(test_set),
    }


def _questions_of_configurations(results: EvaluationResults) -> dict[int, Sequence[int]]:
    """Timed questions for every fixed configuration, taken in turn."""
    sample, runs = results.sample, min(results.config.timed_answers_per_configuration, len(results.sample))
    return {
        configuration: [sample[(order * runs + run) % len(sample)] for run in range(runs)]
        for order, configuration in enumerate(results.timer.distinct_configurations)
    }


def _time_answers(results: EvaluationResults, questions_of_configurations: Mapping[int, Sequence[int]]) -> None:
    """Time all methods in one shuffled run; the controller's choices with fixed knobs too, for its overhead."""
    timer, budgets = results.timer, range(results.test_set.num_budgets)
    for name, choices in results.choices.items():
        questions = results.timed_questions(name)
        if name in results.served_methods:
            timer.add_served(name, ((question, budget) for question in questions for budget in budgets))
        if name == "controller":
            questions = questions[: results.config.timed_answers_other_methods]
        if name == "controller" or name not in results.served_methods:
            timer.add_fixed((question, int(choices[question, budget])) for question in questions for budget in budgets)
    timer.add_fixed(
        (question, configuration)
        for configuration, questions in questions_of_configurations.items()
        for question in questions
    )
    timer.run()
