"""Reward terms: every formula once by hand."""

import math
from dataclasses import replace

import pytest
import torch
from tiny.llava import MOLMOE

from groupwise.core.errors import UserError
from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.workloads.controller.rewards import (
    check_annotators,
    cost_table,
    exact,
    normalize_answer,
    penalty_terms,
    reward_functions,
    vqa,
)


def test_the_penalty_of_the_source_by_hand():
    terms = penalty_terms(torch.tensor([0.5, 1.0, 1.23], dtype=torch.float64))
    # sigmoid(-5), sigmoid(0), sigmoid(2.3)
    assert terms["late_penalty"].tolist() == pytest.approx(
        [-0.5 / (1 + math.exp(5)), -0.25, -0.5 / (1 + math.exp(-2.3))]
    )
    assert terms["overrun_penalty"].tolist() == pytest.approx([0, 0, -0.529])
    assert terms["time_saved"].tolist() == pytest.approx([0.05, 0, 0])
    # a 23 % overshoot costs a right answer
    assert terms["late_penalty"][2] + terms["overrun_penalty"][2] == pytest.approx(-1, abs=0.02)


def test_the_cost_of_a_configuration_by_hand():
    table = cost_table(MOLMOE)
    assert table.shape == (3, 5, 5, 5)
    # -0.05 (12/12 + 8/32 + 16/16) / 3 and -0.05 (3/12 + 4/32 + 12/16) / 3
    assert table[2, 0, 4, 4].item() == pytest.approx(-0.0375)
    assert table[0, 3, 0, 0].item() == pytest.approx(-0.05 * 1.125 / 3)
    dense = cost_table(replace(MOLMOE, full_top_k=0, smallest_top_k=0))
    assert dense[2, 0, 0, 4].item() == pytest.approx(-0.05 * 2 / 3)


def test_exact_match():
    assert exact([], ["4", " Yes ", "5"], answers=[["4"], ["no", "yes"], ["4"]]) == [1, 1, 0]


@pytest.mark.parametrize(
    ("said", "matching", "others", "score"),
    [
        ("red", 1, 2, 1 / 3),
        ("red", 2, 3, 2 / 3),
        ("red", 4, 3, 1),
        ("red", 0, 3, 0),
        # ten annotators: without one of the 3 who match it is 2/3 (3 ways), without another 1 (7 ways)
        ("red", 3, 7, (3 * 2 / 3 + 7) / 10),
        ("red", 2, 8, (2 * 1 / 3 + 8 * 2 / 3) / 10),
    ],
)
def test_soft_match_with_annotators(said, matching, others, score):
    assert vqa([], [said], answers=[["Red."] * matching + ["blue"] * others]) == [pytest.approx(score)]


def test_answers_are_compared_plainly():
    assert normalize_answer("The  Two dogs!") == "2 dogs"
    assert normalize_answer("10:30, a.m. or 2.5") == "10:30 am or 2.5"
    assert normalize_answer("don't") == "dont"
    with pytest.raises(UserError, match="needs at least 3 annotators"):
        check_annotators(RewardFunctionsConfig(functions=("accuracy=vqa",)), [["a"] * 3, ["a"]])
    check_annotators(RewardFunctionsConfig(functions=("exact",)), [["a"]])


def half(prompts, completions, **columns):
    return [0.5] * len(completions)


def functions_of(*specs):
    return reward_functions(RewardFunctionsConfig(functions=specs))


def test_a_function_without_a_name_is_the_accuracy():
    functions = functions_of("workloads.controller.test_rewards:half", "right=exact")
    assert list(functions) == ["accuracy", "right"]
    assert functions["accuracy"]([], ["x", "y"]) == [0.5, 0.5]
    assert list(functions_of("short=exact", "accuracy=vqa")) == ["short", "accuracy"]


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        (("soft",), "one of exact, vqa"),
        (("no_such:thing",), "cannot be imported"),
        (("os:no",), "os has no 'no'"),
        (("right=exact",), r"no reward called 'accuracy', only right.*accuracy=FUNCTION"),
        (("exact", "vqa"), "two rewards called 'accuracy'"),
    ],
)
def test_functions_that_are_refused(specs, says):
    with pytest.raises(UserError, match=says):
        functions_of(*specs)
