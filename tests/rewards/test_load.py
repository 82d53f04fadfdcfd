"""Reward functions by name: built-in, from modules and files, as services; the same grammar in every workload."""

import sys
import time

import pytest

from groupwise.core.errors import UserError
from groupwise.rewards.call import call_rewards
from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.rewards.http import HttpReward
from groupwise.rewards.load import load_reward_functions


def half(prompts, completions, **columns):
    return [0.5] * len(completions)


BUILT_IN = {"half": lambda: half}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(
        "import time\n"
        "def weighted(prompts, completions, level, **columns):\n"
        "    return [len(c) * weight for c, weight in zip(completions, level)]\n"
        "async def later(prompts, completions, **columns):\n"
        "    return [1.0, None, 3.0]\n"
        "def hangs(prompts, completions, **columns):\n"
        "    time.sleep(20)\n"
        "def raises(prompts, completions, **columns):\n"
        "    raise RuntimeError('model down')\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("own_rewards", None)


def load(*functions, **settings):
    return load_reward_functions(RewardFunctionsConfig(functions=functions, **settings), built_in=BUILT_IN)


def test_names_and_sources(folder):
    functions = load(
        "half",
        "again=half",
        "own_rewards:weighted",
        "mine=own_rewards:weighted",
        "filed=own_rewards.py:weighted",
        f"{folder}/own_rewards.py:later",
        "far=https://host:80/path?key=value",
        retries=7,
        timeout_s=3.0,
    )
    assert list(functions) == ["half", "again", "weighted", "mine", "filed", "later", "far"]
    assert functions["far"] == HttpReward("https://host:80/path?key=value", timeout_s=3.0, retries=7)
    del functions["far"]
    terms = call_rewards(functions, ["p"] * 3, ["a", "bb", "ccc"], level=[1, 10, 100]).per_rollout
    assert terms["half"].tolist() == terms["again"].tolist() == [0.5] * 3
    assert terms["weighted"].tolist() == terms["mine"].tolist() == terms["filed"].tolist() == [1, 20, 300]
    assert terms["later"].isnan().tolist() == [False, True, False]


def test_a_function_that_hangs_or_raises_leaves_the_others_alone(folder):
    functions = load("own_rewards:hangs", "own_rewards:raises", "half", timeout_s=0.3)
    start = time.monotonic()
    terms = call_rewards(functions, ["p"] * 3, ["a", "bb", "ccc"])
    assert time.monotonic() - start < 10
    assert terms.per_rollout["hangs"].isnan().all()
    assert terms.per_rollout["raises"].isnan().all()
    assert terms.per_rollout["half"].tolist() == [0.5] * 3
    assert "longer than the 0.3 s of workload.rewards.timeout_s" in terms.failures["hangs"]
    assert "RuntimeError: model down" in terms.failures["raises"]


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ((), r"workload.rewards.functions is empty.*nothing to learn from.*one of half, name=module:function"),
        (("halff",), r"'halff' must be one of half, name=module:function, name=file.py:function or name=http://"),
        (("x=halff",), "'halff' must be one of half"),
        (("a=own_rewards:none",), "'own_rewards:none' cannot be imported. own_rewards has no 'none'"),
        (("a=no_such_module:f",), "cannot be imported. No module named 'no_such_module'"),
        (("a=nowhere.py:f",), "cannot be imported. There is no file nowhere.py"),
        (("own_rewards:number",), "is int, which cannot be called"),
        (("half", "half=own_rewards:later"), "two rewards called 'half'"),
        (("http://host/path?a=b",), "a service without a name, 'http://host/path.*name=FUNCTION"),
    ],
)
def test_specs_that_are_refused(folder, specs, says):
    with pytest.raises(UserError, match=says):
        load(*specs)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"timeout_s": 0.0}, "workload.rewards.timeout_s is 0.0: it must be above 0"),
        ({"retries": -1}, "workload.rewards.retries is -1"),
        ({"backoff_s": -1.0}, "workload.rewards.backoff_s is -1"),
        ({"rows_per_request": 0}, "workload.rewards.rows_per_request is 0"),
    ],
)
def test_settings_that_are_refused(settings, says):
    with pytest.raises(UserError, match=says):
        RewardFunctionsConfig(**settings)
