"""A sharded run's checkpoint: a part from each rank, the same run on any number of ranks, sharded or not."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import ENVIRONMENT
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.workloads.checkpoint_files import checkpoint_errors, has_ema, newest_valid_checkpoint, read_weights

WORKER = Path(__file__).parent / "shard_resume_worker.py"
STRAIGHT = "0-1"
"""One process from the first step on."""


def resume(folder, *pairs):
    program = [sys.executable, WORKER, folder, STRAIGHT, *pairs]
    ended = subprocess.run(program, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {pair: torch.load(folder / f"{pair}.pt") for pair in (STRAIGHT, *pairs)}


def check_same(resumed, straight):
    assert resumed.keys() == straight.keys()
    assert any(name.endswith("exp_avg_sq") for name in straight)
    for name, tensor in straight.items():
        assert_close(resumed[name], tensor, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two_ranks(folder):
    return resume(folder, "2-1", "1-2")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("pair", ["2-1", "1-2"])
def test_saved_sharded_it_resumes_unsharded_and_the_other_way_round(two_ranks, pair):
    check_same(two_ranks[pair], two_ranks[STRAIGHT])


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_saved_by_four_ranks_it_resumes_on_one_two_and_three(tmp_path):
    outcomes = resume(tmp_path, "4-1", "4-2", "4-3")
    for pair in ("4-1", "4-2", "4-3"):
        check_same(outcomes[pair], outcomes[STRAIGHT])


def test_each_rank_writes_half_of_the_bytes_and_nothing_is_pickled(two_ranks, folder):
    checkpoint = folder / "checkpoints-2" / "step-000002"
    names = sorted(path.name for path in checkpoint.iterdir())
    parts = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    assert names == ["checkpoint.json", *parts]
    first, second = ((checkpoint / part).stat().st_size for part in parts)
    assert first == pytest.approx(second, rel=0.1)


def test_whole_weights_are_read_from_the_parts(two_ranks, folder):
    whole, parts = (folder / f"checkpoints-{ranks}" / "step-000002" for ranks in (1, 2))
    assert has_ema(parts)
    for ema in (False, True):
        expected = dict(read_weights(whole, ema=ema))
        read = dict(read_weights(parts, ema=ema))
        assert read.keys() == expected.keys()
        for name, weight in expected.items():
            assert_close(read[name], weight, rtol=0, atol=1e-12)


def test_torch_itself_reads_the_parts(two_ranks, folder):
    checkpoint = folder / "checkpoints-2" / "step-000002"
    ours = {f"policy/{name}": weight for name, weight in read_weights(checkpoint, ema=False)}
    theirs = {name: torch.zeros_like(weight) for name, weight in ours.items()}
    state_dict_loader.load(theirs, storage_reader=HuggingFaceStorageReader(path=str(checkpoint)), no_dist=True)
    assert len(ours) > 10
    assert all(torch.equal(theirs[name], weight) for name, weight in ours.items())


def test_a_missing_or_changed_part_is_refused(two_ranks, folder, tmp_path):
    checkpoint = folder / "checkpoints-2" / "step-000002"
    first, second = sorted(checkpoint.glob("shard-*"))
    for damaged in (first, second):
        moved = damaged.rename(tmp_path / damaged.name)
        assert list(checkpoint_errors(checkpoint)) == [f"{damaged.name} is missing"]
        with pytest.raises(UserError, match=r"Every checkpoint in .* is damaged"):
            newest_valid_checkpoint(checkpoint.parent, lambda message: None)
        content = bytearray(moved.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
        assert list(checkpoint_errors(checkpoint)) == [f"{damaged.name} is not what was written"]
        moved.rename(damaged)
    assert list(checkpoint_errors(checkpoint)) == []
