"""The built-in rewards of completions, each by hand."""

import pytest

from groupwise.core.errors import UserError
from groupwise.rewards.call import call_rewards
from groupwise.workloads.chat.config import ChatRewardsConfig
from groupwise.workloads.chat.rewards import required_columns, reward_functions

PROMPTS = ["p"] * 3
COMPLETIONS = ["2 + 2 = 4\n#### 4", "#### 5", r"so \boxed{4}"]


def rewards_of(*functions, completions=COMPLETIONS, columns=None, **settings):
    loaded = reward_functions(ChatRewardsConfig(functions=functions, **settings), max_new_tokens=10)
    ids = [list(range(length)) for length in (2, 8, 10)]
    return call_rewards(
        loaded, PROMPTS, completions, completion_ids=ids, **(columns or {"answer": ["4", "#### 4.0", "4"]})
    )


def test_by_name():
    terms = rewards_of("numeric", "exact", "regex", "length", regex="^so")
    assert terms.per_rollout["numeric"].tolist() == [1, 0, 1]
    assert terms.per_rollout["exact"].tolist() == [0, 0, 0]
    assert terms.per_rollout["regex"].tolist() == [0, 0, 1]
    # max_length 10: 1 up to 5 tokens, then 2 - 2 x 8 / 10 = 0.4, then 0
    assert terms.per_rollout["length"].tolist() == pytest.approx([1, 0.4, 0])
    assert rewards_of("exact", completions=["4", " 4\n", "four"], columns={"answer": [4, "4", "4"]}).per_rollout[
        "exact"
    ].tolist() == [
        1,
        1,
        0,
    ]


def test_messages_are_read_as_texts():
    messages = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    assert rewards_of("numeric", completions=messages).per_rollout["numeric"].tolist() == [1, 0, 1]


def test_another_column_holds_the_answer():
    terms = rewards_of("numeric", answer_column="solution", columns={"solution": ["4", "5", "6"]})
    assert terms.per_rollout["numeric"].tolist() == [1, 1, 0]
    assert required_columns(ChatRewardsConfig(functions=("numeric",), answer_column="solution")) == ("solution",)
    assert required_columns(ChatRewardsConfig(functions=("right=exact",))) == ("answer",)
    assert required_columns(ChatRewardsConfig(functions=("length",))) == ()


def test_a_built_in_reward_under_another_name():
    assert rewards_of("right=numeric").per_rollout["right"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"functions": ("nummeric",)}, "'nummeric' must be one of numeric, exact, regex, length, name=module:function"),
        ({"functions": ("numeric", "other:numeric")}, "two rewards called 'numeric'"),
        ({"functions": ("regex",), "regex": "("}, r"rewards.regex is '\(', which is not a regular expression"),
        ({"functions": ("regex",)}, "rewards.regex is empty"),
        ({"functions": ()}, "rewards.functions is empty.*at least one reward"),
        ({"max_length": 1}, "rewards.max_length is 1"),
    ],
)
def test_settings_that_are_refused(settings, says):
    with pytest.raises(UserError, match=says):
        reward_functions(ChatRewardsConfig(**settings), max_new_tokens=10)
