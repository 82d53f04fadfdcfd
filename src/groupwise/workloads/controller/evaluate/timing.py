"""Measured latency of answers, one request at a time, and what each method adds to an answer with fixed knobs. All
methods and budgets are shuffled, so that slowdowns of the machine affect all of them equally.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from typing import Any

import numpy as np

from groupwise.latency.meter import LatencyMeter, find_model_parts
from groupwise.latency.records import DECODE, PREFILL, EstimatedLatency, MeasuredLatency
from groupwise.workloads.controller.config import BudgetScope
from groupwise.workloads.controller.evaluate.exact import Choices, EvaluationSet, first_equal, own_candidates
from groupwise.workloads.controller.model.executor import AnswerRequest
from groupwise.workloads.controller.model.knobs import Knobs
from groupwise.workloads.controller.policy.decide import Controller
from groupwise.workloads.controller.serving.limits import ConditionLimits
from groupwise.workloads.controller.serving.server import ControllerServer, ServedAnswer
from groupwise.workloads.controller.task import Question, Task

CONTROLLER = "controller"
"""The stage that only served answers have: the controller's two decisions."""
_WARM_UP = 12
_FIXED = ""
TimingJob = tuple[str, int, int]
"""(method, question, budget) for an answer that a controller serves; (_FIXED, question, configuration) otherwise."""


@dataclass(frozen=True)
class TimedAnswer:
    """The measured latency of one answer, and its estimate."""

    measured: MeasuredLatency
    """With the controller's time as a stage apart from prefill."""
    estimated: EstimatedLatency
    knobs: Knobs
    served: ServedAnswer | None = None

    def latency_ms(self, scope: BudgetScope) -> float:
        """Measured time of the part that the budget covers."""
        decode_ms = self.measured.stages_ms[DECODE] if scope == "first_token" else 0.0
        return self.measured.total_ms - decode_ms

    def pace(self, scope: BudgetScope) -> float:
        """Measured over estimated time of that part."""
        decode_ms = self.estimated.stages_ms.get(DECODE, 0.0) if scope == "first_token" else 0.0
        return self.latency_ms(scope) / (self.estimated.total_ms - decode_ms)


@dataclass(frozen=True)
class AddedTime:
    """What methods add to an answer with fixed knobs: medians in ms."""

    difference_ms: float
    """A served answer less the same one with fixed knobs: the decisions, and the pass that stops for them."""
    stage_one_ms: float
    """The controller's first decision, with its look at the overview."""
    stage_two_ms: float
    words_ms: float
    """A prediction from the words of the question."""
    pairs: int
    """Of answers that were timed for this."""

    @property
    def served_ms(self) -> float:
        """What a controller adds: at least its two decisions, however noisy the difference is."""
        return max(self.difference_ms, self.stage_one_ms + self.stage_two_ms)

    def of(self, method: str) -> float:
        """A table adds nothing. A controller that decides all at once needs one stage, the ceiling as much as the
        controller."""
        by_method = {
            **dict.fromkeys(("controller", "imitation", "ceiling"), self.served_ms),
            "one_stage": self.stage_one_ms,
            "words_classifier": self.words_ms,
        }
        return by_method.get(method, 0.0)


class AnswerTimer:
    """Collects what is to be timed, then times each distinct job once, in random order."""

    def __init__(self, task: Task, test_set: EvaluationSet, controllers: Mapping[str, Controller]):
        self.task, self.test_set = task, test_set
        self.configurations = list(task.executor.options.configurations())
        self._servers = {name: _server(controller, task) for name, controller in controllers.items()}
        self._limits = ConditionLimits(test_set.conditions)
        self._first_equal = first_equal(task.executor.options, own_candidates(task.executor.options))
        """Several configurations may compute the same: the first of them is timed for all."""
        self._jobs: dict[TimingJob, None] = {}
        self._answers: dict[TimingJob, TimedAnswer] = {}

    @property
    def distinct_configurations(self) -> list[int]:
        """Indices of configurations that compute different things."""
        return sorted(set(self._first_equal))

    def add_fixed(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Time these (question, configuration)."""
        self._jobs |= dict.fromkeys((_FIXED, question, self._first_equal[index]) for question, index in pairs)

    def add_served(self, method: str, pairs: Iterable[tuple[int, int]]) -> None:
        """Time these (question, budget) as the method's controller answers them."""
        self._jobs |= dict.fromkeys((method, question, budget) for question, budget in pairs)

    def fixed(self, question: int, configuration: int) -> TimedAnswer:
        return self._answers[_FIXED, question, self._first_equal[configuration]]

    def answers_with(self, configuration: int) -> list[TimedAnswer]:
        """All answers with the knobs of this configuration."""
        index = self._first_equal[configuration]
        return [answer for (method, _, other), answer in self._answers.items() if (method, other) == (_FIXED, index)]

    def served(self, method: str, question: int, budget: int) -> TimedAnswer:
        return self._answers[method, question, budget]

    @property
    def all_fixed(self) -> list[TimedAnswer]:
        """All answers with fixed knobs."""
        return [answer for (method, _, _), answer in self._answers.items() if method == _FIXED]

    def run(self, seed: int = 0) -> None:
        meter = LatencyMeter(find_model_parts(self.task.executor.adapter.model))
        order = list(self._jobs)
        random.Random(seed).shuffle(order)
        for job in [*order[:_WARM_UP], *order]:
            self._answers[job] = self._time(meter, job)

    def measure_added_time(
        self,
        method: str,
        choices: Choices,
        pairs: Sequence[tuple[int, int]],
        predict: Callable[[Sequence[Question]], object] | None,
        seed: int = 0,
    ) -> AddedTime:
        """Time these (question, budget) as the method's controller serves them, and with the knobs that it chooses: the
        two in random order, one directly after the other. Each time a prediction from the words of the question, too.
        """
        meter, source = LatencyMeter(find_model_parts(self.task.executor.adapter.model)), random.Random(seed)
        order = source.sample(list(pairs), len(pairs))
        rows = []
        for question, budget in [*order[: _WARM_UP // 2], *order]:
            index = int(choices[question, budget])
            jobs = [(method, question, budget), (_FIXED, question, self._first_equal[index])]
            timed = {job: self._time(meter, job) for job in source.sample(jobs, 2)}
            served, fixed = (timed[job] for job in jobs)
            assert served.served is not None
            # rounding may tip a choice between two that are equally likely
            same = served.knobs == self.configurations[index]
            difference_ms = served.measured.total_ms - fixed.measured.total_ms if same else nan
            words_ms = _clock_ms(partial(predict, [self.test_set.questions[question]])) if predict else 0.0
            rows.append((difference_ms, served.served.stage_one_ms, served.served.stage_two_ms, words_ms))
        difference_ms, stage_one_ms, stage_two_ms, words_ms = np.nanmedian(rows[-len(order) :], axis=0).tolist()
        return AddedTime(difference_ms, stage_one_ms, stage_two_ms, words_ms, len(order))

    def _time(self, meter: LatencyMeter, job: TimingJob) -> TimedAnswer:
        method, row, index = job
        question = self.test_set.questions[row]
        if method == _FIXED:
            knobs = self.configurations[index]
            measured, _ = _timed(meter, partial(self._answer, AnswerRequest(question.sample, knobs)))
            return TimedAnswer(measured, self._estimate(question, knobs), knobs)
        condition = row * self.test_set.num_budgets + index
        measured, (served,) = _timed(meter, partial(self._serve, self._servers[method], question, condition))
        measured = _separate_controller_time(measured, served)
        return TimedAnswer(measured, self._estimate(question, served.knobs), served.knobs, served)

    def _answer(self, request: AnswerRequest) -> object:
        task = self.task
        return task.executor.answer([request], max_new_tokens=task.max_new_tokens, stop_token=task.stop_token)

    def _serve(self, server: ControllerServer, question: Question, condition: int) -> list[ServedAnswer]:
        """With all that a request takes from its budget on."""
        return server.serve([(question.sample, self._limits[condition])])

    def _estimate(self, question: Question, knobs: Knobs) -> EstimatedLatency:
        (estimated,) = self.task.estimator.estimate(question.prompt_tokens, [knobs])
        return estimated


def _clock_ms(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def _server(controller: Controller, task: Task) -> ControllerServer:
    return ControllerServer(
        controller.policy, task.executor, max_new_tokens=task.max_new_tokens, stop_token=task.stop_token
    )


def _timed(meter: LatencyMeter, answer: Callable[[], Any]) -> tuple[MeasuredLatency, Any]:
    results: list[Any] = []
    return meter.time(lambda: results.append(answer())), results[0]


def _separate_controller_time(measured: MeasuredLatency, served: ServedAnswer) -> MeasuredLatency:
    """The meter counts all that is neither vision nor decoding as prefill: take the controller's time out of it."""
    controller_ms = served.controller_ms
    prefill_ms = measured.stages_ms[PREFILL] - controller_ms
    return replace(measured, stages_ms={**measured.stages_ms, PREFILL: prefill_ms, CONTROLLER: controller_ms})


def sample_questions(test_set: EvaluationSet, count: int, seed: int = 0) -> Sequence[int]:
    """Questions to time, the same for every budget; methods that need fewer take the first of them."""
    return random.Random(seed).sample(range(len(test_set.questions)), min(count, len(test_set.questions)))
