"""Reward functions that exit, fork, block or print without end: the run knows why, and goes on or ends in order."""

import asyncio
import json
import multiprocessing
import os
import sys
import time
from dataclasses import replace

import pytest
from fakes import TinyWorkload, recipe
from processes import groupwise, on_ranks

from groupwise.core.errors import UserError
from groupwise.rewards.call import call_rewards
from groupwise.rewards.time_limit import with_time_limit
from groupwise.training.run import train


def leaves(prompts, completions):
    sys.exit(0)


def leaves_at_once(prompts, completions):
    os._exit(0)


async def leaves_while_awaited(prompts, completions):
    await asyncio.sleep(0)
    sys.exit(0)


async def leaves_at_once_while_awaited(prompts, completions):
    os._exit(0)


async def blocks_the_event_loop(prompts, completions):
    time.sleep(20)


EXITS = {
    leaves: r"sys.exit(0)",
    leaves_at_once: r"os._exit(0)",
    leaves_while_awaited: r"sys.exit(0)",
    leaves_at_once_while_awaited: r"os._exit(0)",
    blocks_the_event_loop: "blocked the event loop",
}


@pytest.mark.parametrize("function", EXITS)
def test_a_function_that_leaves_or_blocks_gives_no_reward_and_others_do(function):
    real_exit = os._exit
    functions = {"good": lambda prompts, completions: [1.0], "bad": with_time_limit(function, 0.3)}
    terms = call_rewards(functions, ["p"], ["c"])
    assert terms.per_rollout["bad"].isnan().all()
    assert EXITS[function] in terms.failures["bad"]
    assert terms.per_rollout["good"].tolist() == [1.0]
    assert os._exit is real_exit


def test_a_forked_child_that_returns_does_not_go_on_training():
    """It would be a second process that trains in the same folder; here, a second one that runs this test."""
    children, read_end, write_end = [], *os.pipe()

    def forks(prompts, completions):
        children.append(os.fork())
        return [1.0]

    terms = call_rewards({"r": forks}, ["p"], ["c"])
    os.write(write_end, b"x")  # whoever gets here
    _, status = os.waitpid(children[0], 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert os.read(read_end, 10) == b"x"
    assert terms.per_rollout["r"].tolist() == [1.0]
    for end in (read_end, write_end):
        os.close(end)


def _half(_number):
    return 0.5


def test_processes_that_a_function_starts_for_itself_are_left_alone():
    def uses_a_pool(prompts, completions):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pool.map(_half, completions)

    assert call_rewards({"r": uses_a_pool}, ["p"], ["c"]).per_rollout["r"].tolist() == [0.5]


@pytest.mark.parametrize("function", [leaves, leaves_at_once])
def test_a_workload_that_exits_is_an_error_not_a_success(monkeypatch, tmp_path, function):
    monkeypatch.setattr(TinyWorkload, "rewards", lambda self, rollouts: function(None, None))
    config = recipe()
    with pytest.raises(UserError, match=r"rewards\(\) of TinyWorkload raised ExitCalledError: it called"):
        train(replace(config, run=replace(config.run, run_dir=tmp_path, preflight=False)))


MISBEHAVES = """
import os, sys, time, fakes, groupwise as gw
from dataclasses import dataclass, replace

class Misbehaves(fakes.TinyWorkload):
    calls = 0
    def rewards(self, rollouts):
        self.calls += 1
        if self.config.noise:
            print("x" * 2**22)
        if self.calls == 4 and os.environ.get("RANK") == "1":
            os._exit(0)
        return super().rewards(rollouts)

@dataclass(frozen=True)
class MisbehavesConfig(fakes.TinyConfig):
    noise: bool = False
    def build(self, device):
        return Misbehaves(self, device)

def recipe():
    return replace(fakes.recipe(), workload=MisbehavesConfig(), run=gw.RunConfig(checkpoint_every=100, preflight=False))
"""


def test_megabytes_of_output_leave_one_json_object(tmp_path):
    (tmp_path / "noisy.py").write_text(MISBEHAVES)
    ended = groupwise("train", tmp_path / "noisy.py", "--run-dir", tmp_path / "run", "--workload.noise", "--json")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert json.loads(ended.stdout)["steps"] == 6
    assert len(ended.stderr) > 6 * 2**22


@pytest.mark.slow
def test_an_exit_on_one_rank_ends_both_with_a_paragraph_and_loses_nothing(tmp_path):
    (tmp_path / "exits.py").write_text(MISBEHAVES)
    ended = on_ranks(2, ["-m", "groupwise", "train", tmp_path / "exits.py", "--run-dir", tmp_path / "run"])
    for rank in (0, 1):
        assert f"groupwise (rank {rank}): rewards() of Misbehaves raised ExitCalledError" in ended.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-000003").is_dir()
