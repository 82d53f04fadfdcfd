"""Out of memory for real: in every stage, on one rank of two, and the result is that of the smaller setting."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import recipe
from hypothesis import given
from hypothesis import strategies as st
from processes import ENVIRONMENT, on_ranks
from safetensors.torch import load_file
from torch.testing import assert_close

from groupwise.core.errors import UserError, is_out_of_memory
from groupwise.training.checkpoint import read_meta
from groupwise.training.rollout import split_by_group
from groupwise.training.run import train
from groupwise.training.run_folder import read_jsonl
from groupwise.workloads.checkpoint_files import checkpoint_errors

HUNGRY = Path(__file__).parent / "hungry.py"
STAGES = ("rollout", "rewards", "reward function", "forward", "backward")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process, limited, and everything that can be asked of it."""
    folder = tmp_path_factory.mktemp("alone")
    names = [*STAGES, "small from the start", "late", "resumed", "own rows", "hopeless", "grown", "optimizer"]
    names += ["evaluation", "last evaluation", "evaluation at once", "shrunk", "shrunk, resumed"]
    words = [sys.executable, str(HUNGRY), str(folder), *names]
    ended = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=170, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder, ended.stderr


def weights(folder, step=6):
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "policy.safetensors")


def choices(folder):
    return [(entry["step"], entry["group"], entry["member"], entry["choices"]) for entry in samples(folder)]


def samples(folder):
    return read_jsonl(folder / "samples.jsonl")


@pytest.mark.parametrize("stage", STAGES)
def test_the_result_is_that_of_the_smaller_setting(alone, stage):
    folder, said = alone
    metrics = read_jsonl(folder / stage / "metrics.jsonl")
    assert len(metrics) == 6
    assert f"Out of memory in {'update' if stage in ('forward', 'backward') else stage[:6].rstrip('s')}" in said
    assert choices(folder / stage) == choices(folder / "small from the start")
    expected = weights(folder / "small from the start")
    for name, weight in weights(folder / stage).items():
        assert_close(weight, expected[name], rtol=0, atol=1e-14)


def test_a_failure_in_preflight_is_remembered_and_bit_identical(alone):
    """From the first step on the cut was the smaller one, so not even the rounding differs."""
    folder, _ = alone
    for stage in ("rollout", "forward", "backward"):
        metrics = read_jsonl(folder / stage / "metrics.jsonl")
        assert {entry["rows_per_pass"] for entry in metrics} == {4}
        expected = weights(folder / "small from the start")
        assert all(torch.equal(weight, expected[name]) for name, weight in weights(folder / stage).items())


def test_rewards_are_asked_in_whole_groups(alone):
    folder, said = alone
    assert "reward_rows 32 -> 16" in said
    metrics = read_jsonl(folder / "rewards" / "metrics.jsonl")
    assert {(entry["rows_per_pass"], entry["reward_rows"]) for entry in metrics} == {(8, 4)}


def test_the_cut_outlives_a_resume(alone):
    folder, said = alone
    metrics = read_jsonl(folder / "late" / "metrics.jsonl")
    assert [entry["rows_per_pass"] for entry in metrics] == [8, 8, 4, 4, 4, 4]
    assert [entry["out_of_memory"] for entry in metrics] == [0, 0, 1, 0, 0, 0]
    assert "Memory ran out earlier in this run: going on with rows_per_pass 4" in said


def test_a_workloads_own_knob_is_lowered_where_it_has_one(alone):
    folder, said = alone
    metrics = read_jsonl(folder / "own rows" / "metrics.jsonl")
    assert {(entry["rows_per_pass"], entry["rollout_rows"]) for entry in metrics} == {(8, 4)}
    assert "rollout_rows 16 -> 8" in said
    assert choices(folder / "own rows") == choices(folder / "small from the start")


def test_with_nothing_left_to_cut_it_stops_with_a_checkpoint_and_advice(alone):
    folder, said = alone
    assert "hopeless (rank 0): Out of memory in rollout with rows_per_pass 1" in said
    assert "What to lower, first things first: 1. " in said
    assert [path.name for path in (folder / "hopeless" / "checkpoints").iterdir()] == ["step-000002"]


def test_a_cut_lowered_after_its_checkpoint_was_written_is_in_it_all_the_same(alone):
    """`hopeless` begins to fail in the step after a checkpoint, `last evaluation` after the last one."""
    folder, _ = alone
    path = folder / "hopeless" / "checkpoints" / "step-000002"
    assert read_meta(path)["cut"]["rows_per_pass"] == 1
    assert not list(checkpoint_errors(path))
    path = folder / "last evaluation" / "checkpoints" / "step-000006"
    assert read_meta(path)["cut"]["stage_rows"] == {"evaluation": 4}
    assert not list(checkpoint_errors(path))


def test_an_evaluation_is_repeated_with_fewer_rows_and_training_keeps_its_own(alone):
    folder, said = alone
    assert "evaluation_rows 16 -> 8; the evaluation is repeated, its result is the same." in said
    metrics = read_jsonl(folder / "evaluation" / "metrics.jsonl")
    assert [entry["out_of_memory"] for entry in metrics] == [2, 0, 0, 0, 0, 0]
    assert {(entry["rows_per_pass"], entry["evaluation_rows"]) for entry in metrics} == {(8, 4)}
    found, expected = (json.loads((folder / name / "eval.json").read_text()) for name in ("evaluation", "rollout"))
    assert found == {moment: pytest.approx(metrics) for moment, metrics in expected.items()}


def test_an_evaluation_that_knows_no_smaller_pieces_stops_and_keeps_what_was_trained(alone):
    folder, said = alone
    assert "evaluation at once (rank 0): Out of memory in evaluation, and HungryWorkload does not say" in said
    assert (folder / "evaluation at once" / "checkpoints" / "step-000006").is_dir()


def test_what_the_user_allowed_shrinks_at_one_row_and_the_step_begins_again(alone):
    folder, said = alone
    assert "length 8 -> 4 for the rest of the run, as --may-shrink allows. THIS CHANGES WHAT IS LEARNED." in said
    metrics = read_jsonl(folder / "shrunk" / "metrics.jsonl")
    assert [entry["out_of_memory"] for entry in metrics] == [0, 0, 4, 0, 0, 0]  # 8, 4, 2 and 1 rows
    assert [entry.get("length") for entry in metrics] == [None, None, 4, 4, 4, 4]
    lengths = {(entry["step"], entry["length"]) for entry in samples(folder / "shrunk")}
    assert lengths == {(0, 8), (1, 8), (2, 4), (3, 4), (4, 4), (5, 4)}
    assert "going on with rows_per_pass 1, length 4" in said


def test_what_cannot_shrink_is_refused(tmp_path):
    def may_shrink(name, **more):
        return replace(recipe(), run=replace(recipe().run, run_dir=tmp_path, may_shrink=(name,)), **more)

    with pytest.raises(UserError, match="updates_per_rollout 2: a step begins again"):
        may_shrink("length")
    once = replace(recipe().optimizer, updates_per_rollout=1)
    with pytest.raises(UserError, match="can shrink nothing when memory runs out at one row"):
        train(may_shrink("group_size", optimizer=once))
    assert not list(tmp_path.iterdir())


def test_it_grows_again_after_quiet_steps_and_waits_longer_after_each_shortage(alone):
    folder, _ = alone
    rows = [entry["rows_per_pass"] for entry in read_jsonl(folder / "grown" / "metrics.jsonl")]
    # two quiet steps, then a try at 8 that fails at once; after the second shortage four quiet steps are needed
    assert rows == [4, 4, 4, 4, 4, 4, 4, 4]
    shortages = [entry["out_of_memory"] for entry in read_jsonl(folder / "grown" / "metrics.jsonl")]
    assert shortages == [1, 0, 0, 1, 0, 0, 0, 0]


def test_an_optimizer_without_room_changes_no_weight(alone):
    folder, said = alone
    assert "optimizer (rank 0): Out of memory in update with rows_per_pass 1" in said
    assert "Making room for the optimizer" in said
    assert not list((folder / "optimizer").glob("checkpoints/step-*"))


def test_one_rank_of_two_fails_and_nobody_waits(alone, tmp_path):
    ended = on_ranks(2, [HUNGRY, tmp_path, *STAGES, "late", "hopeless", "evaluation", "shrunk"], seconds=170)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for stage in STAGES:
        assert choices(tmp_path / stage) == choices(alone[0] / "small from the start")
        expected = weights(alone[0] / "small from the start")
        for name, weight in weights(tmp_path / stage).items():
            assert_close(weight, expected[name], rtol=0, atol=1e-12)
    assert [e["rows_per_pass"] for e in read_jsonl(tmp_path / "late" / "metrics.jsonl")] == [8, 8, 4, 4]
    assert read_meta(tmp_path / "late" / "checkpoints" / "step-000004")["cut"]["rows_per_pass"] == 4
    for rank in (0, 1):
        assert f"hopeless (rank {rank}): Out of memory in rollout with rows_per_pass 1" in ended.stderr
    assert "(rank 1 of 2)" in ended.stderr
    assert {e["evaluation_rows"] for e in read_jsonl(tmp_path / "evaluation" / "metrics.jsonl")} == {4}
    assert [e.get("length") for e in read_jsonl(tmp_path / "shrunk" / "metrics.jsonl")] == [None, None, 4, 4]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=24), st.integers(1, 30))
def test_pieces_tear_no_group_and_lose_no_row(ids, rows):
    pieces = list(split_by_group(torch.tensor(ids), rows))
    assert sorted(torch.cat(pieces).tolist()) == list(range(len(ids)))
    homes = [{ids[row] for row in piece.tolist()} for piece in pieces]
    assert sum(len(home) for home in homes) == len(set(ids))
    assert all(len(piece) <= rows or len(home) == 1 for piece, home in zip(pieces, homes, strict=True))


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NPU out of memory. Tried to allocate 20.00 MiB"), True),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (UserError("We are out of memory jokes."), False),
        (None, False),
    ],
)
def test_what_counts_as_a_shortage(error, short):
    assert is_out_of_memory(error) is short


def test_a_shortage_inside_another_error_is_found():
    outer = KeyError("wrapped")
    outer.__cause__ = MemoryError()
    assert is_out_of_memory(outer)
