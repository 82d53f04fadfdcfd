"""Evaluation sets over the union of drop orders."""

from dataclasses import replace

import pytest
import torch
from tiny.controller import SmallConfig
from tiny.llava import OPTIONS

from groupwise.workloads.controller.config import BudgetConfig
from groupwise.workloads.controller.evaluate.exact import (
    all_candidates,
    build_evaluation_set,
    first_equal,
    own_candidates,
)

CPU = torch.device("cpu")
OTHER_ORDER = tuple(reversed(OPTIONS.drop_order))
CONFIGURATIONS = list(OPTIONS.configurations())


class SomeAnswers:
    """The right answer in each configuration but those left out; no answers to some samples."""

    def __init__(self, questions, missing=(), unknown=()):
        self._right = {each.sample.name: int(each.answers[0]) for each in questions if each.sample.name not in unknown}
        self._missing = missing

    def get_all(self, sample):
        if sample not in self._right:
            return None
        return [None if index in self._missing else (self._right[sample],) for index in range(len(CONFIGURATIONS))]


@pytest.fixture(scope="module")
def workload():
    return SmallConfig(budget=BudgetConfig(values=(0.7, 0.9))).build(CPU)


def with_other_answers(workload, answers):
    workload.task = replace(workload.task, other_answers={OTHER_ORDER: answers})
    return workload


def test_another_order_adds_what_it_computes_otherwise(workload):
    questions = workload.task.questions
    with_other_answers(workload, SomeAnswers(questions))
    candidates = all_candidates(workload.task, questions)
    own = own_candidates(OPTIONS)
    assert candidates[: len(own)] == own
    added = candidates[len(own) :]
    assert added
    assert {candidate.drop_order for candidate in added} == {OTHER_ORDER}
    # with all blocks there is nothing to drop, and what computes the same is there once
    knobs = [CONFIGURATIONS[candidate.configuration] for candidate in added]
    assert all(each.blocks < OPTIONS.total_blocks for each in knobs)
    equal = first_equal(OPTIONS, candidates)
    assert equal[len(own) :] == list(range(len(own), len(candidates)))

    both = build_evaluation_set(workload, questions, candidates)
    alone = build_evaluation_set(workload, questions)
    assert torch.equal(both.accuracy[:, : len(own)], alone.accuracy)
    assert (both.accuracy[:, len(own) :] == 1).all()
    same_knobs = [candidate.configuration for candidate in added]
    assert torch.equal(both.upper_ms[:, len(own) :], alone.upper_ms[:, same_knobs])


def test_a_configuration_is_offered_if_all_questions_have_its_answer(workload):
    questions = workload.task.questions
    with_other_answers(workload, SomeAnswers(questions))
    everything = all_candidates(workload.task, questions)
    missing = {everything[-1].configuration}
    with_other_answers(workload, SomeAnswers(questions, missing))
    offered = all_candidates(workload.task, questions)
    assert missing.isdisjoint(candidate.configuration for candidate in offered if candidate.drop_order == OTHER_ORDER)
    assert len(offered) > len(own_candidates(OPTIONS))
    name = questions[2].sample.name
    with_other_answers(workload, SomeAnswers(questions, unknown={name}))
    assert all_candidates(workload.task, questions) == own_candidates(OPTIONS)
    # Where it is offered all the same, as for training questions, its accuracy is not known.
    known = build_evaluation_set(workload, questions, everything).accuracy[:, len(own_candidates(OPTIONS)) :]
    assert known[2].isnan().all()
    assert (known[[0, 1, 3]] == 1).all()


def test_the_first_questions_alone_are_those_of_a_smaller_set(workload):
    questions = workload.task.questions
    fewer, small = build_evaluation_set(workload, questions).first(3), build_evaluation_set(workload, questions[:3])
    assert fewer.questions == small.questions
    assert torch.equal(fewer.accuracy, small.accuracy)
    assert torch.equal(fewer.feasible(), small.feasible())
    assert torch.equal(fewer.conditions.group_ids, small.conditions.group_ids)
    assert fewer.budget_ms.shape == (3, 2)
