"""Sharded training is the same run: real processes, real gloo, float64, compared with one that is not sharded."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from processes import ENVIRONMENT, on_ranks
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.dist.comm import Comm
from groupwise.dist.sharding import ranks_per_node

WORKER = Path(__file__).parent / "shard_worker.py"
WORKLOADS = ("chat", "controller", "flow", "idle")
PLACEMENTS = ("whole", "spread", "shuffled")
QUICK = ("chat/whole", "chat/blocks", "controller/whole", "flow/blocks", "idle/whole", "idle/blocks")
OUT_OF_MEMORY = ("oom forward/whole", "oom backward/whole", "oom rollout/blocks")
VARIANTS = ("chat lora", "chat checkpointed", "chat plain", "flow by steps")


def run_steps(folder, runs, ranks):
    program = [sys.executable, WORKER, folder, ",".join(runs), *map(str, ranks)]
    ended = subprocess.run(program, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {count: torch.load(folder / f"{count}.pt", weights_only=False) for count in ranks}


def shuffled(runs):
    return [f"{run}/shuffled" for run in runs]


def compare(alone, sharded, run, ranks, copies=1):
    """A sharded run with the one of a single process."""
    name, rollout, _ = run.split("/")
    assert sharded[run]["rollout"] == rollout
    check_same_run(alone[name], sharded[run], ranks, copies)


def check_same_run(alone, sharded, ranks, copies):
    assert sharded["decisions"] == alone["decisions"]
    for here, there in zip(sharded["logp"], alone["logp"], strict=True):
        assert_close(here, there, rtol=0, atol=1e-12)
    assert alone["weights"].dtype == torch.float64
    assert alone["gradient"].abs().max() > 1e-4
    for name in ("gradient", "weights", "ema", "grad_norms"):
        assert_close(sharded[name], alone[name], rtol=0, atol=1e-12)
    # each rank holds its part, up to the padding of tensors whose first axis the ranks do not divide
    assert sum(sharded["held"]) == copies * alone["held"][0]
    assert max(sharded["held"]) < copies * alone["held"][0] / ranks * 1.5


@dataclass(frozen=True)
class Launched(Comm):
    """A rank of several, each of which has been launched on a node with so many."""

    on_nodes: tuple[int, ...] = ()

    def gather_objects(self, objects):
        return list(self.on_nodes)


@pytest.mark.parametrize(
    ("on_nodes", "message"),
    [
        ((2, 2, 1), "the nodes have 1, 2 of 3 ranks.*--shard-over all"),
        ((2, 2, 2), "the nodes have 2 of 3 ranks.*--nproc-per-node"),
        ((1, 1), "each node has one rank.*--nproc-per-node N"),
    ],
)
def test_nodes_that_cannot_hold_a_copy_are_refused(on_nodes, message):
    with pytest.raises(UserError, match=message):
        ranks_per_node(Launched(0, len(on_nodes), torch.device("cpu"), on_nodes=on_nodes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two_ranks(folder):
    return run_steps(folder, shuffled(QUICK + OUT_OF_MEMORY), (1, 2))


@pytest.fixture(scope="module")
def alone(two_ranks):
    """Each run on one process, unsharded."""
    return two_ranks[1]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("run", shuffled(QUICK + OUT_OF_MEMORY))
def test_two_ranks_make_the_same_run_as_one_process(two_ranks, alone, run):
    compare(alone, two_ranks[2], run, 2)


@pytest.mark.parametrize("run", OUT_OF_MEMORY)
def test_a_rank_without_memory_in_a_block_makes_all_ranks_repeat_with_half(two_ranks, alone, run):
    """The other rank waits in a collective of the next block when it happens."""
    assert alone[run.split("/")[0]]["rows_per_pass"] == [2, 2, 2]
    assert two_ranks[2][f"{run}/shuffled"]["rows_per_pass"] == [1, 1, 1]


@pytest.mark.parametrize("run", shuffled(["idle/whole", "idle/blocks"]))
def test_ranks_may_run_the_policy_unequally_often_and_its_blocks_in_another_order(two_ranks, alone, run):
    check_uneven(alone, two_ranks[2], run, 2)


def check_uneven(alone, sharded, run, ranks):
    (expected,) = alone[run.split("/")[0]]["uneven"]
    outputs = sharded[run]["uneven"]
    assert len(outputs) == ranks * (ranks - 1)
    for output in outputs:
        assert_close(output, expected, rtol=0, atol=1e-12)


def test_a_rank_without_memory_for_a_block_of_another_rank_leaves_none_waiting(tmp_path):
    """It has finished, or waits for a smaller block, and has to take part in gathering the larger one."""
    ended = on_ranks(2, [WORKER.with_name("gather_worker.py"), tmp_path / "outcomes.json"], seconds=100)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for ranks in json.loads((tmp_path / "outcomes.json").read_text()).values():
        for rank in ranks:
            assert "can't allocate memory" in rank["raised"]
            assert "(rank 1 of 2)" in rank["raised"]
            assert rank["is_right"]


def run_of(name, placement, ranks):
    """Modes of the rollout alternate, so that any three of workload, mode, placement and ranks meet in all ways."""
    number = WORKLOADS.index(name) + PLACEMENTS.index(placement) + ranks
    return f"{name}/{('blocks', 'whole')[number % 2]}/{placement}"


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{} ranks".format)
def many_ranks(request, folder):
    """A number of ranks, and the outcomes of its runs."""
    ranks = request.param
    runs = [run_of(name, placement, ranks) for name in WORKLOADS for placement in PLACEMENTS]
    return ranks, run_steps(folder, runs, (ranks,))[ranks]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_any_number_of_ranks_makes_the_same_run_wherever_members_are(alone, many_ranks, name, placement):
    ranks, sharded = many_ranks
    compare(alone, sharded, run_of(name, placement, ranks), ranks)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_more_ranks_may_run_the_policy_unequally_often(alone, many_ranks, placement):
    ranks, sharded = many_ranks
    check_uneven(alone, sharded, run_of("idle", placement, ranks), ranks)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_adapters_checkpoints_the_plain_forward_and_a_ratio_per_rollout_are_the_same_run_sharded(tmp_path):
    runs = [f"{name}/{rollout}/shuffled" for name in VARIANTS for rollout in ("whole", "blocks")]
    outcomes = run_steps(tmp_path, runs, (1, 2))
    for run in runs:
        compare(outcomes[1], outcomes[2], run, 2)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_policies_in_float32_and_bfloat16_differ_by_their_rounding_alone(folder):
    """Sharded, weights in bfloat16 are rounded before the norms and the residual stream, too."""
    rounding = {"float32": 1e-5, "bfloat16": 0.02}
    runs = [f"chat {dtype}/{rollout}/shuffled" for dtype in rounding for rollout in ("whole", "blocks")]
    outcomes = run_steps(folder, runs, (1, 2))
    for dtype, share in rounding.items():
        alone = outcomes[1][f"chat {dtype}"]
        whole, blocks = (outcomes[2][run] for run in runs if dtype in run)
        assert whole["weights"].dtype == torch.float32
        assert blocks["decisions"] == whole["decisions"] == alone["decisions"]
        assert torch.equal(blocks["gradient"], whole["gradient"])
        assert torch.equal(blocks["weights"], whole["weights"])
        assert (whole["gradient"] - alone["gradient"]).norm() < share * alone["gradient"].norm()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_copy_on_each_node_is_the_same_run(tmp_path):
    runs = shuffled(["nodes/whole", "nodes/blocks"])
    outcomes = run_steps(tmp_path, runs, (1, 4))
    for run in runs:
        compare(outcomes[1], outcomes[4], run, 4, copies=2)
        check_uneven(outcomes[1], outcomes[4], run, 4)
