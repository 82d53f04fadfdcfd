"""Budgets: what they mean in milliseconds, what is refused, and what is counted."""

from dataclasses import replace

import pytest
import torch
from tiny.controller import LinearCost, question
from tiny.llava import OPTIONS

from groupwise.core.errors import UserError
from groupwise.workloads.controller.conditions import check_some_fit, condition_id, make_conditions
from groupwise.workloads.controller.config import Budget, BudgetConfig
from groupwise.workloads.controller.latency.estimates import ProportionalEstimator

QUESTIONS = [question(0), question(1)]


def conditions(**settings):
    return make_conditions(QUESTIONS, LinearCost(), OPTIONS, BudgetConfig(**settings))


def test_milliseconds_by_hand():
    # full: 5 crops x 10 + 8 blocks x 5 + 8 x 4 experts x 2 + 7 = 161
    # cheapest: 2 x 10 + 5 x 5 + (4 + 4 x 1) x 2 + 7 = 68
    # Hard enforcement compares the upper quantile with the budget, a tenth more; soft the median.
    hard = conditions(values=(0.5, 1.0))
    assert hard.budget_ms.tolist() == pytest.approx([88.55, 177.1, 88.55, 177.1])
    assert hard.relative_budget.tolist() == pytest.approx([(88.55 - 74.8) / (177.1 - 74.8), 1] * 2)
    result = conditions(values=(0.5, 1.0), enforcement="soft")
    assert result.budget_ms.tolist() == [80.5, 161.0, 80.5, 161.0]
    assert result.relative_budget.tolist() == pytest.approx([12.5 / 93, 1, 12.5 / 93, 1])
    assert result.estimates(torch.tensor([0]))[0].flatten()[[0, -1]].tolist() == [68, 161]
    assert [result.budget_of(row).value for row in range(4)] == [0.5, 1.0, 0.5, 1.0]
    assert result.question_of(torch.tensor([0, 3])) == QUESTIONS


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.5, 3.0])
def test_however_much_a_machine_strays_everything_fits_at_1_and_less_looks_different(spread):
    values = (0.45, 0.6, 0.8, 0.99, 1.0)
    strays = ProportionalEstimator(OPTIONS, spread=spread)
    result = make_conditions(QUESTIONS[:1], strays, OPTIONS, BudgetConfig(values, on_infeasible="cheapest"))
    share = result.relative_budget
    assert (share.diff() > 0.01).all()
    assert share[-1] == 1
    fitting = result.feasible(torch.arange(len(values))).flatten(1).sum(1)
    assert (fitting.diff() > 0).all()
    assert fitting[-1] == len(list(OPTIONS.configurations()))


@pytest.mark.parametrize(("unit", "value"), [("fraction", 0.4), ("ms", 70.0)])
def test_training_is_refused_where_nothing_fits(unit, value):
    """74.8 of 177.1 ms is the cheapest: 0.422 of the full one."""
    smaller = conditions(values=(value / 2, value), unit=unit, on_infeasible="cheapest")
    rule = "0.422" if unit == "fraction" else "74.8"
    with pytest.raises(UserError, match=rf"(?s)Nothing fits: .*{value:g}.*74.8 ms .*at least one budget above {rule}"):
        check_some_fit(smaller)
    check_some_fit(conditions(values=(value / 2, 2 * value), unit=unit, on_infeasible="cheapest"))


def test_proportions_are_no_milliseconds():
    config = BudgetConfig(values=(40.0,), unit="ms")
    with pytest.raises(UserError, match=r"unit is 'ms', but the estimator knows proportions"):
        make_conditions(QUESTIONS, ProportionalEstimator(OPTIONS), OPTIONS, config)


def test_a_budget_to_the_first_token_leaves_decoding_out():
    result = conditions(values=(1.0,), scope="first_token")
    assert result.budget_ms.tolist() == pytest.approx([1.1 * 161 - 7] * 2)
    assert conditions(values=(1.0,), scope="first_token", enforcement="soft").budget_ms.tolist() == [154, 154]
    _, uppers = result.estimates(torch.tensor([0]))
    assert uppers.max().item() == pytest.approx(1.1 * 161 - 7)


def test_equal_questions_under_other_budgets_are_other_groups():
    result = conditions(values=(0.5, 1.0))
    assert len(set(result.group_ids.tolist())) == 4
    ids = {condition_id(0, QUESTIONS[0], Budget(value), value) for value in (80.0, 90.0)}
    ids |= {condition_id(0, QUESTIONS[0], Budget(80.0, scope="first_token"), 80.0)}
    assert len(ids) == 3
    assert condition_id(0, QUESTIONS[0], Budget(80.0), 80.0) in ids


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"values": (0.0,)}, "above 0"),
        ({"values": (-40.0,), "unit": "ms"}, "above 0"),
        ({"values": (float("nan"),)}, "above 0"),
        ({"values": (40.0,)}, "If milliseconds are meant"),
        ({"values": ()}, "at least one"),
        ({"values": (0.5, 0.5)}, "all different"),
        ({"values": (70.0,), "unit": "ms"}, "below the cheapest configuration, which is estimated at 74.8 ms"),
        ({"values": (0.08,), "unit": "ms"}, "It looks like seconds: 0.08 s are 80 ms"),
        ({"values": (60.0,), "unit": "ms", "enforcement": "soft"}, "estimated at 68 ms"),
        ({"values": (0.3,)}, r"0.3 of the full configuration \(53.13 ms\) is below the cheapest"),
    ],
)
def test_a_budget_that_cannot_hold_is_refused(settings, words):
    with pytest.raises(UserError, match=words):
        conditions(**settings)


@pytest.mark.parametrize("enforcement", ["hard", "soft"])
def test_on_request_the_cheapest_is_taken_and_counted(enforcement):
    result = conditions(values=(50.0, 200.0), unit="ms", enforcement=enforcement, on_infeasible="cheapest")
    assert result.infeasible.tolist() == [True, False, True, False]
    fits = result.feasible(torch.arange(2))
    assert fits[0].nonzero().tolist() == [[0, 0, 0, 0]]
    assert fits[1].all()
    assert result.over_budget(torch.arange(2), torch.zeros(2, 4, dtype=torch.long)).tolist() == [True, False]


def test_an_estimator_without_sense_is_refused():
    class Broken(LinearCost):
        def one(self, knobs):
            return replace(super().one(knobs), total_ms=-1.0)

    with pytest.raises(UserError, match="every estimate must be a finite time above 0"):
        make_conditions(QUESTIONS, Broken(), OPTIONS, BudgetConfig())
