"""Sharded training is the same run: real processes, real gloo, float64, compared with one process that is not sharded."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import ENVIRONMENT
from torch.testing import assert_close

WORKER = Path(__file__).parent / "shard_worker.py"
WORKLOADS = ("chat", "controller", "flow", "idle")
QUICK = (*WORKLOADS, "oom forward", "oom backward")
VARIANTS = ("chat lora", "chat plain", "flow by steps")


def run_steps(folder, names, placements, ranks):
    program = [sys.executable, WORKER, folder, ",".join(names), ",".join(placements), *map(str, ranks)]
    ended = subprocess.run(program, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {count: torch.load(folder / f"{count}.pt", weights_only=False) for count in ranks}


def check_same_run(alone, sharded, ranks):
    assert sharded["decisions"] == alone["decisions"]
    for here, there in zip(sharded["logp"], alone["logp"], strict=True):
        assert_close(here, there, rtol=0, atol=1e-12)
    assert alone["weights"].dtype == torch.float64
    assert alone["gradient"].abs().max() > 1e-4
    for name in ("gradient", "weights", "ema", "grad_norms"):
        assert_close(sharded[name], alone[name], rtol=0, atol=1e-12)
    # each rank holds its part, up to the padding of tensors whose first axis the ranks do not divide
    assert sum(sharded["held"]) == alone["held"][0]
    assert max(sharded["held"]) < alone["held"][0] / ranks * 1.5


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_steps(tmp_path_factory.mktemp("two"), QUICK, ["shuffled"], (1, 2))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_make_the_same_run_as_one_process(two_ranks, name):
    check_same_run(two_ranks[1][f"{name} shuffled"], two_ranks[2][f"{name} shuffled"], 2)


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_rank_without_memory_in_a_block_makes_all_ranks_repeat_with_half(two_ranks, stage):
    """The other rank waits in a collective of the next block when it happens."""
    name = f"oom {stage} shuffled"
    assert two_ranks[1][name]["rows_per_pass"] == [2, 2, 2]
    assert two_ranks[2][name]["rows_per_pass"] == [1, 1, 1]


@pytest.fixture(scope="module")
def many_ranks(tmp_path_factory):
    return run_steps(tmp_path_factory.mktemp("many"), WORKLOADS, ["whole", "spread", "shuffled"], (1, 2, 3, 4))


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("placement", ["whole", "spread", "shuffled"])
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks_makes_the_same_run_wherever_members_are(many_ranks, ranks, name, placement):
    check_same_run(many_ranks[1][f"{name} {placement}"], many_ranks[ranks][f"{name} {placement}"], ranks)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_adapters_the_plain_forward_and_a_ratio_per_rollout_are_the_same_run_sharded(tmp_path):
    outcomes = run_steps(tmp_path, VARIANTS, ["shuffled"], (1, 2))
    for name in VARIANTS:
        check_same_run(outcomes[1][f"{name} shuffled"], outcomes[2][f"{name} shuffled"], 2)
