"""What each method adds to an answer, and what it is charged."""

from dataclasses import replace

import pytest
import torch
from tiny.controller import EXECUTOR, SmallConfig
from tiny.estimator import fixed_estimator
from tiny.llava import OPTIONS

from groupwise.workloads.controller.config import BudgetConfig
from groupwise.workloads.controller.evaluate.baselines import controller_choices
from groupwise.workloads.controller.evaluate.exact import build_evaluation_set
from groupwise.workloads.controller.evaluate.report import _extra_ms, _overhead_pairs
from groupwise.workloads.controller.evaluate.timing import AddedTime, AnswerTimer
from groupwise.workloads.controller.latency.estimates import KnobLatencyEstimator


@pytest.fixture(scope="module")
def workload():
    return SmallConfig(budget=BudgetConfig(values=(0.7, 0.9))).build(torch.device("cpu"))


def test_added_time_is_measured_in_pairs_and_the_prediction_with_every_one(workload):
    test_set = build_evaluation_set(workload, workload.task.questions)
    timer = AnswerTimer(workload.task, test_set, {"controller": workload.controller})
    predicted = []
    pairs = _overhead_pairs(range(8), 2)
    assert sorted(pairs) == [(question, budget) for question in range(8) for budget in (0, 1)]
    choices = controller_choices(workload.controller, test_set)
    added = timer.measure_added_time("controller", choices, pairs, predicted.append)
    assert added.pairs == 16
    assert len(predicted) == 16 + 6  # six warm up
    assert {question.sample.name for (question,) in predicted} == {each.sample.name for each in test_set.questions}
    assert added.stage_one_ms > added.words_ms > 0
    assert added.stage_two_ms > 0


def test_every_method_is_charged_what_it_adds(workload):
    added = AddedTime(difference_ms=1.5, stage_one_ms=0.3, stage_two_ms=0.2, words_ms=0.1, pairs=9)
    charged = {"controller": 1.5, "imitation": 1.5, "ceiling": 1.5, "one_stage": 0.3, "words_classifier": 0.1}
    for method in (*charged, "lookup", "table_by_first_word", "cheapest"):
        assert added.of(method) == charged.get(method, 0.0)
    # however noisy the difference is, the controller's two decisions were timed
    assert replace(added, difference_ms=-2.0).of("controller") == 0.5
    # The estimates of a profiled machine include the controller; counted work knows no milliseconds.
    profiled = replace(workload.task, estimator=KnobLatencyEstimator(fixed_estimator(EXECUTOR.adapter.model), OPTIONS))
    assert _extra_ms(profiled, added, "lookup") == -1.5
    assert _extra_ms(profiled, added, "words_classifier") == pytest.approx(-1.4)
    assert _extra_ms(profiled, added, "ceiling") == 0
    assert _extra_ms(workload.task, added, "lookup") == 0
