"""Out of memory for real: in every stage, on one rank of two, and the result is that of the smaller setting."""

import gc
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import ENVIRONMENT, on_ranks
from safetensors.torch import load_file
from torch.testing import assert_close

from groupwise.core.errors import OutOfMemoryError, UserError
from groupwise.core.io.files import read_jsonl
from groupwise.memory.recovery import Recovery
from groupwise.workloads.checkpoint_files import checkpoint_errors, open_tensors, read_metadata, read_weights

HUNGRY = Path(__file__).parent / "hungry.py"
STAGES = ("rollout", "rewards", "reward function", "forward", "backward")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process, limited, and everything that can be asked of it."""
    folder = tmp_path_factory.mktemp("alone")
    names = [*STAGES, "small from the start", "late", "resumed", "own rows", "hopeless"]
    names += ["evaluation", "last evaluation", "evaluation at once", "step", "step resumed", "copied", "copy"]
    return folder, run_hungry(folder, *names)


def run_hungry(folder, *names):
    program = [sys.executable, str(HUNGRY), str(folder), *names]
    ended = subprocess.run(program, env=ENVIRONMENT, capture_output=True, text=True, timeout=170, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stderr


def weights(folder, step=6):
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "policy.safetensors")


def choices(folder):
    return [(entry["step"], entry["group"], entry["member"], entry["choices"]) for entry in samples(folder)]


def samples(folder):
    return read_jsonl(folder / "samples.jsonl")


@pytest.mark.parametrize("stage", STAGES)
def test_the_result_is_that_of_the_smaller_setting(alone, stage):
    folder, stderr = alone
    metrics = read_jsonl(folder / stage / "metrics.jsonl")
    assert len(metrics) == 6
    assert f"Out of memory in {'update' if stage in ('forward', 'backward') else stage[:6].rstrip('s')}" in stderr
    assert choices(folder / stage) == choices(folder / "small from the start")
    expected = weights(folder / "small from the start")
    for name, weight in weights(folder / stage).items():
        assert_close(weight, expected[name], rtol=0, atol=1e-14)


def test_limits_halved_in_preflight_give_a_bit_identical_run(alone):
    """The limit was the smaller one from the first step on, so not even the rounding differs."""
    folder, _ = alone
    for stage in ("rollout", "forward", "backward"):
        metrics = read_jsonl(folder / stage / "metrics.jsonl")
        assert {entry["rows_per_pass"] for entry in metrics} == {4}
        expected = weights(folder / "small from the start")
        assert all(torch.equal(weight, expected[name]) for name, weight in weights(folder / stage).items())


def test_rewards_are_computed_in_whole_groups(alone):
    folder, stderr = alone
    assert "reward_rows 32 -> 16" in stderr
    metrics = read_jsonl(folder / "rewards" / "metrics.jsonl")
    assert {(entry["rows_per_pass"], entry["reward_rows"]) for entry in metrics} == {(8, 4)}


def test_halved_limits_survive_a_resume(alone):
    folder, stderr = alone
    metrics = read_jsonl(folder / "late" / "metrics.jsonl")
    assert [entry["rows_per_pass"] for entry in metrics] == [8, 8, 4, 4, 4, 4]
    assert [entry["oom_retries"] for entry in metrics] == [0, 0, 1, 0, 0, 0]
    assert "Memory ran out earlier in this run: continuing with rows_per_pass 4" in stderr


def test_a_workloads_own_limit_is_halved_where_it_has_one(alone):
    folder, stderr = alone
    metrics = read_jsonl(folder / "own rows" / "metrics.jsonl")
    assert {(entry["rows_per_pass"], entry["decode_rows"]) for entry in metrics} == {(8, 4)}
    assert "decode_rows 16 -> 8" in stderr
    assert choices(folder / "own rows") == choices(folder / "small from the start")


def test_at_one_row_it_stops_with_a_checkpoint_and_advice(alone):
    folder, stderr = alone
    assert "hopeless (rank 0): Out of memory in rollout with rows_per_pass 1" in stderr
    assert "What to reduce, in this order: 1. " in stderr
    assert [path.name for path in (folder / "hopeless" / "checkpoints").iterdir()] == ["step-000002"]


def test_a_limit_halved_after_its_checkpoint_was_written_is_in_it_all_the_same(alone):
    """`hopeless` begins to fail in the step after a checkpoint, `last evaluation` after the last one."""
    folder, _ = alone
    path = folder / "hopeless" / "checkpoints" / "step-000002"
    assert read_metadata(path)["row_limits"] == {"rows_per_pass": 1}
    assert not list(checkpoint_errors(path))
    path = folder / "last evaluation" / "checkpoints" / "step-000006"
    assert read_metadata(path)["row_limits"] == {"rows_per_pass": 8, "eval_rows": 4}
    assert not list(checkpoint_errors(path))


def test_an_evaluation_is_repeated_with_fewer_rows_and_training_keeps_its_own(alone):
    folder, stderr = alone
    assert "eval_rows 16 -> 8; the evaluation is repeated, its result is the same." in stderr
    metrics = read_jsonl(folder / "evaluation" / "metrics.jsonl")
    assert [entry["oom_retries"] for entry in metrics] == [2, 0, 0, 0, 0, 0]
    assert {(entry["rows_per_pass"], entry["eval_rows"]) for entry in metrics} == {(8, 4)}
    smaller, expected = (json.loads((folder / name / "eval.json").read_text()) for name in ("evaluation", "rollout"))
    assert smaller == {moment: pytest.approx(metrics) for moment, metrics in expected.items()}


def test_an_evaluation_without_a_limit_stops_and_keeps_what_was_trained(alone):
    folder, stderr = alone
    assert (
        "evaluation at once (rank 0): Out of memory in evaluation, and HungryWorkload has no limit for its rows there"
        in stderr
    )
    assert (folder / "evaluation at once" / "checkpoints" / "step-000006").is_dir()


def test_an_optimizer_without_memory_changes_no_weight(tmp_path):
    """In a process of its own: what threads of earlier runs have reserved counts against the limit."""
    stderr = run_hungry(tmp_path, "optimizer")
    assert "optimizer (rank 0): Out of memory in update with rows_per_pass 1" in stderr
    assert "Reserving memory for the optimizer" in stderr
    assert not list((tmp_path / "optimizer").glob("checkpoints/step-*"))


def test_an_optimizer_that_runs_out_in_its_step_stops_and_the_run_can_be_resumed(alone):
    folder, stderr = alone
    assert "step (rank 0): Out of memory in the middle of the update of step 3" in stderr
    assert_resumed(folder)


def assert_resumed(folder):
    """The step that was lost was trained again, from the checkpoint before it."""
    expected = dict(read_weights(folder / "small from the start/checkpoints/step-000006", ema=False))
    for name, weight in read_weights(folder / "step/checkpoints/step-000006", ema=False):
        assert_close(weight, expected[name], rtol=0, atol=1e-12)
    assert [entry["step"] for entry in read_jsonl(folder / "step" / "metrics.jsonl")] == list(range(6))


def test_a_checkpoint_whose_copy_does_not_fit_is_written_from_the_state_itself(alone):
    folder, stderr = alone
    assert_written_without_copy(folder, stderr)


def assert_written_without_copy(folder, stderr):
    assert stderr.count("The checkpoint is written without a copy, and training waits for it.") == 1
    for step in ("step-000001", "step-000002"):
        copied, written = (open_tensors(folder / name / "checkpoints" / step) for name in ("copied", "copy"))
        assert {*copied} == {*written}
        assert all(torch.equal(copied.read(name), written.read(name)) for name in copied)
        assert not list(checkpoint_errors(folder / "copy" / "checkpoints" / step))


def test_one_rank_of_two_runs_out_and_both_continue_with_half(alone, tmp_path):
    ended = on_ranks(2, [HUNGRY, tmp_path, *STAGES, "late", "hopeless", "evaluation"], seconds=170)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for stage in STAGES:
        assert choices(tmp_path / stage) == choices(alone[0] / "small from the start")
        expected = weights(alone[0] / "small from the start")
        for name, weight in weights(tmp_path / stage).items():
            assert_close(weight, expected[name], rtol=0, atol=1e-12)
    assert [e["rows_per_pass"] for e in read_jsonl(tmp_path / "late" / "metrics.jsonl")] == [8, 8, 4, 4]
    assert read_metadata(tmp_path / "late" / "checkpoints" / "step-000004")["row_limits"] == {"rows_per_pass": 4}
    for rank in (0, 1):
        assert f"hopeless (rank {rank}): Out of memory in rollout with rows_per_pass 1" in ended.stderr
    assert "(rank 1 of 2)" in ended.stderr
    assert {e["eval_rows"] for e in read_jsonl(tmp_path / "evaluation" / "metrics.jsonl")} == {4}


@pytest.mark.slow
def test_one_rank_of_two_without_memory_for_the_optimizer_changes_no_weight(tmp_path):
    ended = on_ranks(2, [HUNGRY, tmp_path, "optimizer"])
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Reserving memory for the optimizer" in ended.stderr
    for rank in (0, 1):
        assert f"optimizer (rank {rank}): Out of memory in update with rows_per_pass 1" in ended.stderr
    assert not list((tmp_path / "optimizer").glob("checkpoints/step-*"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("shard", [[], ["--shard"]], ids=["whole", "sharded"])
def test_one_rank_of_two_runs_out_in_its_step_and_in_the_copy_for_a_checkpoint(tmp_path, shard):
    names = ["small from the start", "step", "step resumed", "copied", "copy"]
    ended = on_ranks(2, [HUNGRY, tmp_path, *names, *shard], seconds=350)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for rank in (0, 1):
        assert f"step (rank {rank}): Out of memory in the middle of the update of step 3" in ended.stderr
    assert_resumed(tmp_path)
    assert_written_without_copy(tmp_path, ended.stderr)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_that_share_the_weights_save_the_complete_steps_when_they_cannot_go_on(tmp_path):
    ended = on_ranks(2, [HUNGRY, tmp_path, "hopeless late", "--shard"], seconds=250)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for rank in (0, 1):
        assert f"hopeless late (rank {rank}): Out of memory in rollout with rows_per_pass 1" in ended.stderr
    assert not list(checkpoint_errors(tmp_path / "hopeless late" / "checkpoints" / "step-000003"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_of_two_ranks_that_share_the_weights_runs_out_and_both_continue_with_half(tmp_path):
    names = [*STAGES, "evaluation", "small from the start", "gather"]
    ended = on_ranks(2, [HUNGRY, tmp_path, *names, "--shard"], seconds=350)
    assert ended.returncode == 0, ended.stderr[-3000:]
    expected = dict(read_weights(tmp_path / "small from the start/checkpoints/step-000006", ema=False))
    for stage in (*STAGES, "evaluation"):
        assert choices(tmp_path / stage) == choices(tmp_path / "small from the start")
        for name, weight in read_weights(tmp_path / stage / "checkpoints/step-000006", ema=False):
            assert_close(weight, expected[name], rtol=0, atol=1e-12)
    assert ended.stderr.count("(rank 1 of 2)") >= len(STAGES)
    for rank in (0, 1):  # weights that do not fit are no matter of rows: all ranks stop, none waits
        assert f"gather (rank {rank}): Out of memory in update with rows_per_pass 1" in ended.stderr


class TwoLimits:
    """What recovery needs of a workload."""

    def __init__(self, decode_rows):
        self.policy, self.row_limits = torch.nn.Linear(1, 1), {"decode_rows": decode_rows}


@pytest.fixture(scope="module")
def few_objects():
    """Each retry collects garbage, which takes long where a whole test session is searched for it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 300), st.integers(1, 100), st.integers(1, 64))
def test_limits_are_halved_in_order_down_to_one_row(decode_rows, rows_per_pass, rows_per_rank):
    workload, warnings, tried = TwoLimits(decode_rows), [], []
    recovery = Recovery(workload, rows_per_pass=rows_per_pass, rows_per_rank=rows_per_rank, warn=warnings.append)

    def fail():
        tried.append((workload.row_limits["decode_rows"], recovery.limits["rows_per_pass"]))
        raise OutOfMemoryError("no memory left.")

    with pytest.raises(UserError, match="Out of memory in rollout with rows_per_pass 1, which cannot be halved"):
        recovery.retry_smaller("rollout", fail)
    assert tried[0] == (decode_rows, rows_per_pass)
    assert tried[-1] == (1, 1)
    for (decode, rows), (fewer_decode, fewer_rows) in itertools.pairwise(tried):
        if decode > 1:
            assert (fewer_decode, fewer_rows) == (max(1, min(decode, rows_per_rank) // 2), rows)
        else:
            assert (fewer_decode, fewer_rows) == (1, max(1, min(rows, rows_per_rank) // 2))
    assert len(warnings) == len(tried) - 1 == recovery.step_metrics()["oom_retries"] - 1


def test_a_retry_starts_with_the_same_random_numbers_and_buffers():
    workload, drawn = TwoLimits(8), []
    workload.policy.register_buffer("calls", torch.zeros(1))
    recovery = Recovery(workload, rows_per_pass=4, rows_per_rank=4, warn=lambda text: None)

    def draw():
        workload.policy.calls += 1
        drawn.append((torch.rand(1).item(), workload.policy.calls.item()))
        if len(drawn) < 3:
            raise OutOfMemoryError("no memory left.")
        return "result"

    assert recovery.retry_smaller("update", draw) == "result"
    assert len(set(drawn)) == 1
    assert recovery.limits == {"decode_rows": 8, "rows_per_pass": 1}


def test_saved_limits_apply_where_they_are_lower_and_known():
    recovery = Recovery(TwoLimits(8), rows_per_pass=4, rows_per_rank=16, warn=lambda text: None)
    saved = {"decode_rows": 2, "rows_per_pass": 4, "reward_rows": 8, "eval_rows": 1}
    assert recovery.restore(saved) == {"decode_rows": 2, "reward_rows": 8}
    assert recovery.step_metrics() == {"oom_retries": 0, "rows_per_pass": 4, "decode_rows": 2, "reward_rows": 8}
