"""Answers by the clock, one request at a time, those of all methods and budgets mixed: a slow spell meets all alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from groupwise.latency.meter import LatencyMeter, find_model_parts
from groupwise.latency.records import DECODE, PREFILL, EstimatedLatency, MeasuredLatency
from groupwise.workloads.controller.config import BudgetScope
from groupwise.workloads.controller.evaluate.exact import EvaluationSet
from groupwise.workloads.controller.model.executor import AnswerRequest
from groupwise.workloads.controller.model.knobs import Knobs
from groupwise.workloads.controller.policy.decide import Controller
from groupwise.workloads.controller.serving.server import ControllerServer, ServedAnswer, budget_limit_of
from groupwise.workloads.controller.task import Question, Task

CONTROLLER = "controller"
"""The stage that only a controlled answer has: choosing."""
_WARM_UP = 12
TimingJob = tuple[str, int, int]
"""The method that serves it, or "" for knobs that are given; the question; its budget, or the configuration."""


@dataclass(frozen=True)
class TimedAnswer:
    """One answer, timed, and what was expected of it."""

    measured: MeasuredLatency
    """With the controller's own time apart from prefill."""
    estimated: EstimatedLatency
    knobs: Knobs
    served: ServedAnswer | None = None

    def spent_ms(self, span: BudgetScope) -> float:
        """Measured time of what the budget is for."""
        decode_ms = self.measured.stages_ms[DECODE] if span == "first_token" else 0.0
        return self.measured.total_ms - decode_ms


class AnswerTimer:
    """Collects what is to be timed, then times each distinct thing once, in random order."""

    def __init__(self, task: Task, exam: EvaluationSet, controllers: Mapping[str, Controller]):
        self.task, self.exam = task, exam
        self.servers = {name: server_of(controller, task) for name, controller in controllers.items()}
        self._knobs = list(task.executor.options.configurations())
        paths = [(knobs.tier, task.executor.options.block_path(knobs)) for knobs in self._knobs]
        self._same = [paths.index(path) for path in paths]
        self._jobs: dict[TimingJob, None] = {}
        self._found: dict[TimingJob, TimedAnswer] = {}

    @property
    def distinct_configurations(self) -> list[int]:
        """Configurations that compute different things."""
        return sorted(set(self._same))

    def ask_with(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Time these (question, configuration)."""
        self._jobs |= dict.fromkeys(("", question, self._same[number]) for question, number in pairs)

    def ask_served(self, name: str, pairs: Iterable[tuple[int, int]]) -> None:
        """Time these (question, budget) as this controller answers them."""
        self._jobs |= dict.fromkeys((name, question, budget) for question, budget in pairs)

    def given(self, question: int, number: int) -> TimedAnswer:
        return self._found["", question, self._same[number]]

    def knows(self, question: int, number: int) -> bool:
        return ("", question, self._same[number]) in self._found

    def served(self, name: str, question: int, budget: int) -> TimedAnswer:
        return self._found[name, question, budget]

    @property
    def all_given(self) -> list[TimedAnswer]:
        """Everything that was timed with given knobs."""
        return [answer for (name, _, _), answer in self._found.items() if not name]

    def run(self, seed: int = 0) -> None:
        meter = LatencyMeter(find_model_parts(self.task.executor.adapter.model))
        order = list(self._jobs)
        random.Random(seed).shuffle(order)
        for job in [*order[:_WARM_UP], *order]:
            self._found[job] = self._time(meter, job)

    def _time(self, meter: LatencyMeter, job: TimingJob) -> TimedAnswer:
        name, number, which = job
        question = self.exam.questions[number]
        if name:
            allowance = budget_limit_of(self.exam.conditions, number * self.exam.budget_ms.shape[1] + which)
            timing, (served,) = _timed(meter, partial(self.servers[name].serve, [(question.sample, allowance)]))
            return TimedAnswer(
                _separate_controller_time(timing, served), self._estimate(question, served.knobs), served.knobs, served
            )
        knobs = self._knobs[which]
        timing, _ = _timed(meter, partial(self._answer, AnswerRequest(question.sample, knobs)))
        return TimedAnswer(timing, self._estimate(question, knobs), knobs)

    def _answer(self, request: AnswerRequest) -> object:
        task = self.task
        return task.executor.answer([request], max_new_tokens=task.max_new_tokens, stop_token=task.stop_token)

    def _estimate(self, question: Question, knobs: Knobs) -> EstimatedLatency:
        (estimated,) = self.task.estimator.estimate(question.prompt_tokens, [knobs])
        return estimated


def server_of(controller: Controller, task: Task) -> ControllerServer:
    return ControllerServer(
        controller.policy, task.executor, max_new_tokens=task.max_new_tokens, stop_token=task.stop_token
    )


def _timed(meter: LatencyMeter, act: Callable[[], Any]) -> tuple[MeasuredLatency, Any]:
    kept: list[Any] = []
    return meter.time(lambda: kept.append(act())), kept[0]


def _separate_controller_time(timing: MeasuredLatency, served: ServedAnswer) -> MeasuredLatency:
    """All that is neither vision nor decoding was counted as prefill: take the controller out of it."""
    own_ms = served.controller_ms
    stages = {**timing.stages_ms, PREFILL: timing.stages_ms[PREFILL] - own_ms, CONTROLLER: own_ms}
    return replace(timing, stages_ms=stages)


def sample_questions(exam: EvaluationSet, wanted: int, seed: int = 0) -> Sequence[int]:
    """Questions to be timed, the same for every budget; methods that need fewer take the first of them."""
    return random.Random(seed).sample(range(len(exam.questions)), min(wanted, len(exam.questions)))
