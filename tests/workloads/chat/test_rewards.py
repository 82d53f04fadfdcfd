"""Rewards by name and of one's own: TRL's signature, each logged by its name, failures missing."""

import sys
import time

import pytest

from groupwise.core.errors import UserError
from groupwise.rewards.call import call_rewards
from groupwise.workloads.chat.config import JudgeConfig
from groupwise.workloads.chat.rewards import required_columns, reward_functions

PROMPTS = ["p"] * 3
SAID = ["2 + 2 = 4\n#### 4", "#### 5", r"so \boxed{4}"]


def judged(*functions, said=SAID, columns=None, **settings):
    found = reward_functions(JudgeConfig(functions=functions, **settings), max_new_tokens=10)
    ids = [list(range(length)) for length in (2, 8, 10)]
    return call_rewards(found, PROMPTS, said, completion_ids=ids, **(columns or {"answer": ["4", "#### 4.0", "4"]}))


def test_by_name():
    terms = judged("numeric", "exact", "regex", "length", pattern="^so")
    assert terms.per_rollout["numeric"].tolist() == [1, 0, 1]
    assert terms.per_rollout["exact"].tolist() == [0, 0, 0]
    assert terms.per_rollout["regex"].tolist() == [0, 0, 1]
    # longest 10: 1 up to 5 tokens, then 2 - 2 x 8 / 10 = 0.4, then 0
    assert terms.per_rollout["length"].tolist() == pytest.approx([1, 0.4, 0])
    assert judged("exact", said=["4", " 4\n", "four"], columns={"answer": [4, "4", "4"]}).per_rollout[
        "exact"
    ].tolist() == [
        1,
        1,
        0,
    ]


def test_messages_are_read_as_texts():
    said = [[{"role": "assistant", "content": text}] for text in SAID]
    assert judged("numeric", said=said).per_rollout["numeric"].tolist() == [1, 0, 1]


def test_another_column_holds_the_answer():
    terms = judged("numeric", answer_column="solution", columns={"solution": ["4", "5", "6"]})
    assert terms.per_rollout["numeric"].tolist() == [1, 1, 0]
    assert required_columns(JudgeConfig(functions=("numeric",), answer_column="solution")) == ("solution",)
    assert required_columns(JudgeConfig(functions=("length",))) == ()


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(
        "import time\n"
        "def shout(prompts, completions, completion_ids, level, **columns):\n"
        "    return [len(ids) * weight for ids, weight in zip(completion_ids, level)]\n"
        "async def later(prompts, completions, **columns):\n"
        "    return [1.0, None, 3.0]\n"
        "def hangs(prompts, completions, **columns):\n"
        "    time.sleep(20)\n"
        "def raises(prompts, completions, **columns):\n"
        "    raise RuntimeError('judge down')\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("own_rewards", None)


def test_functions_of_ones_own_get_columns_and_token_ids_and_fail_by_themselves(own_module):
    names = ("own_rewards:shout", "own_rewards:later", "own_rewards:hangs", "own_rewards:raises", "numeric")
    begun = time.monotonic()
    terms = judged(*names, seconds=0.3, columns={"level": [1, 10, 100], "answer": ["4", "4", "4"]})
    assert time.monotonic() - begun < 10
    assert terms.per_rollout["shout"].tolist() == [2, 80, 1000]
    assert terms.per_rollout["later"].isnan().tolist() == [False, True, False]
    assert terms.per_rollout["hangs"].isnan().all()
    assert terms.per_rollout["raises"].isnan().all()
    assert terms.per_rollout["numeric"].tolist() == [1, 0, 1]
    assert "longer than the 0.3 s of judge.seconds" in terms.failures["hangs"]
    assert "RuntimeError: judge down" in terms.failures["raises"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"functions": ("nummeric",)}, "names 'nummeric': it must be one of numeric, exact, regex, length, or"),
        ({"functions": ("own_rewards:none",)}, "'own_rewards:none', which cannot be imported"),
        ({"functions": ("no_such_module:f",)}, "'no_such_module:f', which cannot be imported"),
        ({"functions": ("own_rewards:number",)}, "which is int and cannot be called"),
        ({"functions": ("numeric", "other:numeric")}, "names two rewards 'numeric'"),
        ({"functions": ("regex",), "pattern": "("}, r"judge.pattern is '\(', which is not a regular expression"),
        ({"functions": ("regex",)}, "judge.pattern is empty"),
        ({"functions": ()}, "judge.functions is .*at least one name"),
        ({"seconds": 0.0}, "judge.seconds is 0.0: it must be above 0"),
    ],
)
def test_what_cannot_be_asked_is_refused_at_the_start(own_module, settings, says):
    with pytest.raises(UserError, match=says):
        reward_functions(JudgeConfig(**settings), max_new_tokens=10)
