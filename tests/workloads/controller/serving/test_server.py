"""What the server chooses is what the controller decides, and nothing runs that was not chosen."""

import pytest
import torch
from tiny.controller import EXECUTOR, SmallConfig
from tiny.llava import OPTIONS, sample

from groupwise.workloads.controller.config import BudgetConfig
from groupwise.workloads.controller.model.executor import AnswerRequest, PrefixItem
from groupwise.workloads.controller.model.knobs import Knobs
from groupwise.workloads.controller.policy.decide import choices_to_knobs, greedy_option
from groupwise.workloads.controller.serving.limits import BudgetLimit, ConditionLimits, LeastBounds, PacedBounds
from groupwise.workloads.controller.serving.server import ControllerServer, ServedTimer

BUDGETS = (0.6, 0.7, 0.8, 0.9, 1.2)


def limit_of(bound_ms, limit_ms):
    return BudgetLimit(PacedBounds(LeastBounds(bound_ms)), limit_ms, relative_budget=0.5)


@pytest.fixture(scope="module")
def workload():
    return SmallConfig(budget=BudgetConfig(values=BUDGETS)).build(torch.device("cpu"))


@pytest.fixture(scope="module")
def server(workload):
    return ControllerServer(workload.policy, EXECUTOR)


def test_what_is_served_is_what_was_decided_and_what_the_model_answers(workload, server):
    conditions = workload.held_out
    rows = torch.arange(len(conditions))
    decided = choices_to_knobs(OPTIONS, workload.controller.decide(conditions, rows, greedy_option).choices)
    for row, question in zip(rows.tolist(), conditions.question_of(rows), strict=True):
        limit = ConditionLimits(conditions)[row]
        (served,) = server.serve([(question.sample, limit)])
        assert served.knobs == decided[row]
        (alone,), _ = EXECUTOR.answer([AnswerRequest(question.sample, served.knobs)])
        assert served.tokens == alone.tokens
        assert min(served.stage_one_ms, served.stage_two_ms) > 0


def test_many_requests_are_served_as_each_alone(workload, server):
    """Among them the same question under several budgets, which share one prefix."""
    conditions = workload.held_out
    rows, limits = range(len(conditions)), ConditionLimits(conditions)
    questions = conditions.question_of(torch.arange(len(conditions)))
    requests = [(question.sample, limits[row]) for row, question in zip(rows, questions, strict=True)]
    together = server.serve(requests)
    for request, served in zip(requests, together, strict=True):
        (alone,) = server.serve([request])
        assert (served.knobs, served.choices, served.tokens) == (alone.knobs, alone.choices, alone.tokens)
    assert len({served.knobs for served in together}) > 1


def test_serving_encodes_one_tier_and_runs_no_block_twice(workload, server):
    question = workload.held_out.questions[0]
    whole = EXECUTOR.run_prefix([PrefixItem([question.sample], "low")])
    part = EXECUTOR.run_prefix([PrefixItem([question.sample], "low", until=2)])
    assert (whole.computed.counter.block_rows, part.computed.counter.block_rows) == (3, 2)
    key = question.sample.name, "low"
    assert list(part.latency_tokens[key]) == [1, 2]
    for position, token in part.latency_tokens[key].items():
        assert torch.equal(token, whole.latency_tokens[key][position])
    calls, run = [], EXECUTOR.blocks.run
    EXECUTOR.blocks.run = lambda block, rows, *rest, **more: (
        calls.append((block, len(rows))) or run(block, rows, *rest, **more)
    )
    try:
        limit = limit_of(torch.ones(OPTIONS.shape), 1e9)
        (served,) = server.serve([(question.sample, limit)])
    finally:
        del EXECUTOR.blocks.run
    assert calls == [(block, 1) for block, top_k in enumerate(OPTIONS.block_path(served.knobs)) if top_k]


def test_if_no_configuration_fits_the_cheapest_is_served(workload, server):
    conditions = workload.held_out
    bound_ms = conditions.bound_ms(torch.tensor([0]))[0]
    asked = conditions.questions[0].sample
    (served,) = server.serve([(asked, limit_of(bound_ms, 0.1))])
    assert served.knobs == OPTIONS.cheapest
    # Of several that are equally cheap it is the first, as in `Conditions`, whatever the network prefers.
    (equal,) = server.serve([(asked, limit_of(torch.ones_like(bound_ms), 0.1))])
    assert equal.choices == (0, 0, 0, 0)


def test_the_timer_answers_with_the_given_knobs():
    timer, calls, run = ServedTimer(EXECUTOR), [], EXECUTOR.blocks.run
    knobs = Knobs("medium", 2, 3, 6)
    EXECUTOR.blocks.run = lambda block, *rest, **more: calls.append(block) or run(block, *rest, **more)
    try:
        measured = timer(EXECUTOR, AnswerRequest(sample(3), knobs), 2)
    finally:
        del EXECUTOR.blocks.run
    assert calls == [block for block, top_k in enumerate(OPTIONS.block_path(knobs)) if top_k]
    assert measured.decode_steps == 1
    assert measured.total_ms > 0
