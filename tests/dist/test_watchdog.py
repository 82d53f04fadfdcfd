"""A rank that is stuck in a call is ended with its stacks and code 3; one that is slow is left alone."""

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from processes import ENVIRONMENT, groupwise, kill, on_ranks, start, wait_for_steps

from groupwise.dist.watchdog import Look, StuckDetector, ThreadWatcher

HERE = ((1, 1),)
ELSEWHERE = ((1, 1), (2, 2))
FILES = ("policy", "optimizer", "ema")


def looks(*changes):
    """One a second, each with changes to what the last one saw: nothing happens, unless said so."""
    seen = [Look(seconds=0.0, cpu_seconds=0.0, pieces=0, has_run=False, place=HERE)]
    for second, change in enumerate(changes, 1):
        seen.append(replace(seen[-1], **{"has_run": False, "seconds": float(second), **change}))
    return seen


def stuck_at(seen, *, limit_s=4.0):
    """The second at which it is found out; None where it is not."""
    views = iter(seen)
    detector = StuckDetector(limit_s, lambda: next(views))
    return next((index for index in range(1, len(seen)) if detector.is_stuck()), None)


POLLS = {"has_run": True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{}] * 10, 4),
        ([{"cpu_seconds": float(second)} for second in range(10)], 4),  # busy, and never back in Python
        ([POLLS] * 10, 4),
        ([POLLS, POLLS, {"place": ELSEWHERE, **POLLS}, {"place": HERE, **POLLS}, *[POLLS] * 6], 4),
        ([{}, {}, {"pieces": 1}, *[{}] * 7], 7),  # 4 s after its last piece of work
        ([{"pieces": piece} for piece in range(10)], None),
        ([{"place": ((1, second),), "has_run": True} for second in range(10)], None),
        ([{"cpu_seconds": float(second), "has_run": True} for second in range(10)], None),
        ([{"in_debugger": True}] * 10, None),
    ],
    ids=["blocked", "spins", "polls", "polls and looks up", "late", "works", "moves", "computes", "in a debugger"],
)
def test_stuck_is_who_does_no_work_and_runs_no_python_or_only_waits(changes, expected):
    assert stuck_at(looks(*changes)) == expected


def test_time_in_which_the_process_was_stopped_does_not_count():
    """Hours pass between two looks: they count as 5 s."""
    assert stuck_at(looks({}, {"seconds": 1e4}, {"seconds": 1e4 + 1}), limit_s=10.0) is None
    assert stuck_at(looks({}, {"seconds": 1e4}, {"seconds": 1e4 + 5}), limit_s=10.0) == 3


COLLECTING = """
import gc, threading
from groupwise.dist.watchdog import ThreadWatcher

class Node:
    pass

def leave_garbage():
    node = Node()
    node.itself, node.local = node, threading.local()
    node.local.node = node

watcher = ThreadWatcher()
gc.set_threshold(1, 1, 1)  # a look makes objects, and so a collection: thread-local garbage needs a lock
for _ in range(2000):
    leave_garbage()
    watcher.look()
    leave_garbage()
    watcher.where()
"""


def test_looking_at_a_thread_never_waits_for_a_garbage_collection():
    ended = subprocess.run([sys.executable, "-c", COLLECTING], env=ENVIRONMENT, timeout=60, check=False)
    assert ended.returncode == 0


def test_a_thread_that_has_run_python_is_seen_to():
    watcher = ThreadWatcher()
    watcher.look()
    assert [watcher.look().has_run for _ in range(3)] == [True] * 3


def test_a_reward_that_does_not_return_ends_with_stacks_and_code_3(tmp_path):
    stuck = groupwise("train", "dist.stuck:recipe", "--run-dir", tmp_path, "--json")
    assert stuck.returncode == 3, stuck.stderr[-3000:]
    assert "stuck.py:" in stuck.stderr
    assert "in rewards_in_groups" in stuck.stderr  # the stack
    message = stuck.stderr.splitlines()[-1]
    assert message.startswith("groupwise: rank 0 makes no progress since 4 s (--rank-timeout-s) at step 2, reward: ")
    assert "Step 2 is saved." in message
    assert json.loads(stuck.stdout) == {"error": message.removeprefix("groupwise: ")}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_is_resumed_byte_identical_and_a_slow_reward_is_left_alone(tmp_path):
    stuck, slow = (("train", "dist.stuck:recipe", "--run-dir", tmp_path / name) for name in ("stuck", "slow"))
    assert groupwise(*stuck).returncode == 3
    resumed, unbroken = groupwise(*stuck, "--resume"), groupwise(*slow, "--workload.how", "slow")
    assert "after step 2." in resumed.stderr
    for ended in (resumed, unbroken):
        assert ended.returncode == 0, ended.stderr[-3000:]
    checkpoints = (tmp_path / name / "checkpoints/step-000004" for name in ("stuck", "slow"))
    first, second = ([(path / f"{name}.safetensors").read_bytes() for name in FILES] for path in checkpoints)
    assert first == second


@pytest.mark.slow
def test_of_a_call_that_keeps_the_interpreters_lock_the_stacks_are_shown(tmp_path):
    process = start("train", "dist.stuck:recipe", "--run-dir", tmp_path, "--workload.how", "locked")
    lines = itertools.takewhile(lambda line: "in train_step" not in line, process.stderr)
    assert any("in rewards_in_groups" in line for line in lines)
    kill(process)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_ranks_the_stuck_one_shows_its_stacks_and_the_complete_steps_are_saved(tmp_path, rank):
    program = ["-m", "groupwise", "train", "dist.stuck:recipe", "--run-dir", tmp_path, "--workload.rank", rank]
    ended = on_ranks(2, [*program, "--json"], seconds=250)
    assert ("makes no progress" if rank == 0 else "did not answer") in json.loads(ended.stdout)["error"]
    assert f"Rank {rank} (last seen at step 2, reward) did not answer within 4 s" in ended.stderr
    assert f"groupwise (rank {rank}): rank {rank} makes no progress" in ended.stderr
    assert (tmp_path / "checkpoints" / "step-000002").is_dir()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_process_that_was_stopped_goes_on(tmp_path):
    """For longer than the time limit."""
    process = start("train", "fakes:slow_recipe", "--rank-timeout-s", 8, "--steps", 60, "--run-dir", tmp_path)
    wait_for_steps(tmp_path, 3, process)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=12)
    os.kill(process.pid, signal.SIGCONT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr[-2000:]
