"""The final evaluation of a trained controller, top to bottom."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from groupwise.workloads.base import EvaluationReport
from groupwise.workloads.controller.evaluate import baselines, predictors
from groupwise.workloads.controller.evaluate.ablation import ablated_controllers
from groupwise.workloads.controller.evaluate.comparison import (
    LATENCIES,
    Curve,
    LatencyOnTestQuestions,
    at_equal_latency,
    choices_under_limits,
    gain,
)
from groupwise.workloads.controller.evaluate.exact import (
    Choices,
    EvaluationSet,
    all_candidates,
    build_evaluation_set,
    first_equal,
)
from groupwise.workloads.controller.evaluate.metrics import (
    EvaluationResults,
    by_budget,
    controller_overhead,
    estimate_errors,
    fixed_configuration_metrics,
    headline_metrics,
    uncontrolled_metrics,
)
from groupwise.workloads.controller.evaluate.predictors import Predictor
from groupwise.workloads.controller.evaluate.render import draw, tables
from groupwise.workloads.controller.evaluate.timing import AddedTime, AnswerTimer, sample_questions
from groupwise.workloads.controller.latency.estimates import KnobLatencyEstimator
from groupwise.workloads.controller.latency.source import check_calibration, recalibrate
from groupwise.workloads.controller.policy.decide import Controller
from groupwise.workloads.controller.serving.server import ServedTimer
from groupwise.workloads.controller.task import Question, Task
from groupwise.workloads.controller.workload import ControllerWorkload

IMAGE_FILE = "eval.png"
WORD_TABLES = ("table_by_first_word", "words_classifier")
_GROUPS: Mapping[str, Callable[[Question], str]] = {
    "lookup": baselines.no_group,
    "table_by_first_word": baselines.first_word,
    "question_type_oracle": baselines.question_type,
}
"""The tables: one choice per budget for all questions of a group."""


@dataclass(frozen=True)
class Methods:
    """What was trained and selected, before anything is timed."""

    controllers: Mapping[str, Controller]
    scores: Mapping[str, baselines.Scores]
    """Of methods that choose the best candidate that fits, on the test questions."""
    words: Predictor | None
    """The words classifier; None where predictors are left out."""


def evaluate_controller(workload: ControllerWorkload) -> EvaluationReport:
    """Train and select baselines, evaluate on the test questions, time a sample of the answers."""
    profiled = workload.task.estimator
    workload, slowdown = recalibrate_if_drifted(workload)
    task = workload.task
    assert task.test_questions is not None, "a task without test questions has no final evaluation"
    selection = task.selection_questions() if task.selection_questions else task.held_out
    test = task.test_questions()
    candidates = all_candidates(task, [*selection, *test])
    selection_set = build_evaluation_set(workload, selection, candidates)
    test_set = build_evaluation_set(workload, test, candidates)
    methods = _train_and_select(workload, selection_set, test_set)
    results, best_words = _choose_and_time(workload, methods, test_set)
    metrics = {
        **headline_metrics(results),
        "words_method": best_words,
        "selection_questions": len(selection_set.questions),
        "drop_orders": [list(order) for order in dict.fromkeys(candidate.drop_order for candidate in candidates)],
        "slowdown_since_profile": slowdown,
        "recalibrated": task.estimator is not profiled,
        "budgets": by_budget(results),
        **_comparison(results, methods, best_words),
        "ablation": _ablation(results, methods, rows_per_pass=workload.eval_rows),
        "uncontrolled": uncontrolled_metrics(results),
        "controller_overhead": controller_overhead(results),
        "estimate": estimate_errors(results),
        "fixed_configurations": fixed_configuration_metrics(results),
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
    slowdown, is_calibrated = check_calibration(task.estimator, task.executor, samples, timer=timer)
    if is_calibrated:
        return workload, slowdown
    estimator, slowdown = recalibrate(task.estimator, task.executor, samples, timer=timer, answers=answers)
    recalibrated = copy(workload)
    recalibrated.task = replace(task, estimator=estimator)
    return recalibrated, slowdown


def _train_and_select(workload: ControllerWorkload, selection_set: EvaluationSet, test_set: EvaluationSet) -> Methods:
    """Tables from the selection questions; predictors and imitation from those and the training questions."""
    config, seed = workload.config.eval, workload.config.policy_seed
    scores = {name: baselines.table_scores(selection_set, test_set, group_of) for name, group_of in _GROUPS.items()}
    controllers, words = {"controller": workload.controller}, None
    if not (config.predictor_steps or config.imitation_steps):
        return Methods(controllers, scores, words)
    fit_set = build_evaluation_set(workload, _fit_questions(workload.task, selection_set), selection_set.candidates)
    prefilled = fit_set.first(config.prefilled_questions)
    if config.predictor_steps:
        trained = _predictors(workload, fit_set, prefilled)
        scores |= {name: predictor(test_set.questions).double() for name, predictor in trained.items()}
        words = trained["words_classifier"]
    if config.imitation_steps:
        steps = config.imitation_steps
        controllers["imitation"] = baselines.train_imitation(workload, prefilled, steps=steps, seed=seed)
    return Methods(controllers, scores, words)


def _fit_questions(task: Task, selection_set: EvaluationSet) -> list[Question]:
    """Training questions whose answers are precomputed, and the selection questions: nothing has to be answered."""
    precomputed = task.answers.precomputed
    if precomputed is None:
        return list(selection_set.questions)
    known = [question for question in task.questions if precomputed.get_all(question.sample.name) is not None]
    return [*known, *selection_set.questions]


def _predictors(workload: ControllerWorkload, fit_set: EvaluationSet, prefilled: EvaluationSet) -> dict[str, Predictor]:
    config, states = workload.config.eval, workload.controller.hidden_states
    train = partial(
        predictors.train_predictor,
        first_equal=first_equal(workload.options, fit_set.candidates),
        steps=config.predictor_steps,
        seed=workload.config.policy_seed,
    )
    words = predictors.words_of(fit_set.questions)
    before_the_model = predictors.join(words, predictors.overview_of(states))
    everything = predictors.join(before_the_model, predictors.latency_tokens_of(states))
    one_stage = train(fit_set, before_the_model)
    return {
        "words_classifier": train(fit_set, words),
        "one_stage": one_stage,
        "ceiling": train(prefilled, everything, base=one_stage),
    }


def _choose_and_time(
    workload: ControllerWorkload, methods: Methods, test_set: EvaluationSet
) -> tuple[EvaluationResults, str]:
    """Each method's choices for each test question and budget, with its own time charged; the answers of a sample are
    timed. Also the name of the better table by words."""
    config, task = workload.config.eval, workload.task
    choices = {
        name: baselines.controller_choices(controller, test_set, workload.eval_rows)
        for name, controller in methods.controllers.items()
    }
    timer = AnswerTimer(task, test_set, methods.controllers)
    sample = sample_questions(test_set, max(config.timed_answers, config.timed_answers_other_methods))
    pairs = _overhead_pairs(sample[: config.timed_answers], test_set.num_budgets)
    added = timer.measure_added_time("controller", choices["controller"], pairs, methods.words)
    extra_ms = partial(_extra_ms, task, added)
    choices |= {name: baselines.choose(scores, test_set, extra_ms(name)) for name, scores in methods.scores.items()}
    best_words = _better_words(choices, test_set)
    choices["words"] = choices[best_words]
    free = extra_ms("lookup")
    choices |= {
        "per_question_oracle": baselines.per_question_oracle(test_set, free),
        "random_feasible": baselines.random_feasible(test_set, free),
        "slowest_feasible": baselines.slowest_feasible(test_set, free),
        "cheapest": baselines.cheapest(test_set),
    }
    own_ms = {name: added.of(best_words if name == "words" else name) for name in choices}
    results = EvaluationResults(test_set, choices, timer, tuple(methods.controllers), own_ms, added, sample, config)
    _time_answers(results)
    return results, best_words


def _overhead_pairs(questions: Sequence[int], budgets: int) -> list[tuple[int, int]]:
    """Each question under two budgets, all budgets in turn."""
    return [(question, (index + shift) % budgets) for shift in (0, 1) for index, question in enumerate(questions)]


def _extra_ms(task: Task, added: AddedTime, method: str) -> float:
    """What a method takes beyond the estimate. Estimates of a profiled machine include the controller's time; others
    are no milliseconds of this machine, and all methods are charged alike."""
    return added.of(method) - added.served_ms if isinstance(task.estimator, KnobLatencyEstimator) else 0.0


def _better_words(choices: Mapping[str, Choices], test_set: EvaluationSet) -> str:
    """By accuracy on the test questions: hindsight in favor of the table."""
    known = [name for name in WORD_TABLES if name in choices]
    return max(known, key=lambda name: float(test_set.accuracy_of(choices[name]).nanmean()))


def _time_answers(results: EvaluationResults) -> None:
    """Time all methods in one shuffled run, and each configuration by itself."""
    timer, budgets, sample = results.timer, range(results.test_set.num_budgets), results.sample
    for name in results.choices:
        pairs = [(question, budget) for question in results.timed_questions(name) for budget in budgets]
        if name in results.served_methods:
            timer.add_served(name, pairs)
        else:
            timer.add_fixed((question, results.configuration(name, question, budget)) for question, budget in pairs)
    runs = min(results.config.timed_answers_per_configuration, len(sample))
    timer.add_fixed(
        (sample[(order * runs + run) % len(sample)], configuration)
        for order, configuration in enumerate(timer.distinct_configurations)
        for run in range(runs)
    )
    full = timer.configurations.index(timer.task.executor.options.full)
    timer.add_fixed((question, full) for question in results.timed_questions("uncontrolled"))
    timer.run()


def _comparison(results: EvaluationResults, methods: Methods, best_words: str) -> dict[str, Any]:
    """The controller against any other method under the same budgets; and against the main ones at equal latency."""
    test_set, pictures = results.test_set, results.test_set.pictures
    gains = {
        name: gain(results.accuracy("controller"), results.accuracy(name), pictures)
        for name in results.choices
        if name != "controller"
    }
    scores = {**methods.scores, "words": methods.scores[best_words]}
    latency = LatencyOnTestQuestions(test_set, [answer.pace(results.scope) for answer in results.timer.all_fixed])
    curves: dict[str, Curve] = {}
    for name in ("lookup", "words", "one_stage", "ceiling"):
        if name in scores:
            extra_ms = _extra_ms(results.timer.task, results.added, best_words if name == "words" else name)
            chosen = choices_under_limits(scores[name], test_set, extra_ms)
            curves[name] = latency.curve(chosen, results.own_ms[name])
    controller = latency.curve(results.choices["controller"], results.own_ms["controller"])
    return {
        "gain_over_lookup": gains["lookup"],
        "gain_over_words": gains["words"],
        "gains": {name: {key: entry[key] for key in ("mean", "interval")} for name, entry in gains.items()},
        **{f"at_equal_{name}": at_equal_latency(controller, curves, pictures, name) for name in LATENCIES},
    }


def _ablation(results: EvaluationResults, methods: Methods, *, rows_per_pass: int) -> dict[str, float]:
    """Mean accuracy of the controller when one of its inputs is replaced."""
    test_set = results.test_set
    ablated = ablated_controllers(methods.controllers["controller"], test_set)
    choices = {
        name: baselines.controller_choices(controller, test_set, rows_per_pass) for name, controller in ablated.items()
    }
    choices = {"controller": results.choices["controller"], **choices}
    return {
        name: float(test_set.accuracy_of(chosen)[results.graded].nanmean(1).nanmean())
        for name, chosen in choices.items()
    }
