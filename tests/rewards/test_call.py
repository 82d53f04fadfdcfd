import asyncio
import math
import time

import numpy as np
import pytest
import torch

from groupwise.core.errors import UserError
from groupwise.rewards.call import call_rewards

PROMPTS, COMPLETIONS = ["a", "b", "c"], ["x", "yy", "zzz"]


def length(prompts, completions, **columns):
    return [len(completion) for completion in completions]


async def slow_length(prompts, completions, **columns):
    await asyncio.sleep(0.2)
    return length(prompts, completions)


def test_sync_and_async_functions_and_columns():
    def matches(prompts, completions, answer, **columns):
        return [completion == right for completion, right in zip(completions, answer, strict=True)]

    terms = call_rewards({"length": slow_length, "right": matches}, PROMPTS, COMPLETIONS, answer=["x", "-", "zzz"])
    assert terms.per_rollout["length"].tolist() == [1, 2, 3]
    assert terms.per_rollout["right"].tolist() == [1, 0, 1]
    assert not terms.failures


def test_async_functions_run_together():
    start = time.perf_counter()
    call_rewards({str(index): slow_length for index in range(10)}, PROMPTS, COMPLETIONS)
    assert time.perf_counter() - start < 1.0  # one after the other would take 2 s


def test_inside_a_running_event_loop_as_in_a_notebook():
    async def cell():
        return call_rewards({"length": length, "slow": slow_length}, PROMPTS, COMPLETIONS)

    assert asyncio.run(cell()).per_rollout["slow"].tolist() == [1, 2, 3]


def test_a_function_that_raises_leaves_its_own_term_missing_with_the_reason():
    def broken(prompts, completions, **columns):
        raise ZeroDivisionError("no words")

    terms = call_rewards({"length": length, "broken": broken}, PROMPTS, COMPLETIONS)
    assert terms.per_rollout["length"].tolist() == [1, 2, 3]
    assert terms.per_rollout["broken"].isnan().all()
    assert "ZeroDivisionError: no words" in terms.failures["broken"]
    assert "test_call.py" in terms.failures["broken"]


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_none_nan_and_infinity_are_missing(value):
    terms = call_rewards({"r": lambda prompts, completions: [1.0, value, 3]}, PROMPTS, COMPLETIONS)
    assert terms.per_rollout["r"].isnan().tolist() == [False, True, False]
    assert f"returned {value} for 1 of 3 rows" in terms.failures["r"]


def test_tensors_are_taken_too():
    terms = call_rewards({"r": lambda prompts, completions: torch.tensor([1.0, 2.0, 3.0])}, PROMPTS, COMPLETIONS)
    assert terms.per_rollout["r"].tolist() == [1, 2, 3]
    terms = call_rewards({"r": lambda prompts, completions: np.array([1.0, 2.0, 3.0])}, PROMPTS, COMPLETIONS)
    assert terms.per_rollout["r"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([1.0, 2.0], "returned 2 values for 3 rows"),
        (1.0, "returned float"),
        ("abc", "returned str"),
        (None, "returned NoneType"),
        ([1.0, "good", 2.0], r"'good' \(str\) for row 1"),
        (torch.ones(3, 1), "returned Tensor"),
    ],
)
def test_what_is_not_a_list_of_numbers_is_refused(answer, says):
    with pytest.raises(UserError, match=says):
        call_rewards({"r": lambda prompts, completions: answer}, PROMPTS, COMPLETIONS)


def test_a_column_may_be_called_like_a_parameter():
    """Columns come from datasets of others."""
    terms = call_rewards({"length": length}, ["p"], ["abc"], functions=["f"])
    assert terms.per_rollout["length"].tolist() == [3.0]
