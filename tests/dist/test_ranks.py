"""The result does not depend on where it ran: real processes, real gloo, every placement."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import ENVIRONMENT, on_ranks
from safetensors.torch import load_file
from torch.testing import assert_close

from groupwise.core.io.files import read_jsonl

WORKER = Path(__file__).parent / "worker.py"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    by_ranks = {}
    for ranks in (1, 2, 4, 8):
        ended = on_ranks(ranks, [WORKER, folder / f"{ranks}.pt"])
        assert ended.returncode == 0, ended.stderr[-3000:]
        by_ranks[ranks] = torch.load(folder / f"{ranks}.pt", weights_only=False)
    return by_ranks


NAMES = [f"{kind} {loss}" for kind in ("whole", "spread", "shuffled") for loss in ("clipped", "ranking")]


@pytest.mark.parametrize("name", [*NAMES, "idle ranks"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_same_rollouts_gradient_and_weights_on_any_number_of_ranks(outcomes, ranks, name):
    alone, together = outcomes[1][name], outcomes[ranks][name]
    assert torch.equal(together["choices"], alone["choices"])
    assert alone["gradient"].abs().max() > 1e-4
    assert_close(together["gradient"], alone["gradient"], rtol=0, atol=1e-10)
    assert_close(together["weights"], alone["weights"], rtol=0, atol=1e-8)
    assert together["rewards"] == pytest.approx(alone["rewards"], abs=1e-12)
    assert [(s["group"], s["member"]) for s in together["samples"]] == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_each_rank_evaluates_a_part_and_all_have_the_metrics(outcomes):
    alone = outcomes[1]["whole clipped"]
    for ranks in (2, 4, 8):
        together = outcomes[ranks]["whole clipped"]
        assert together["held_out"] == pytest.approx(alone["held_out"], abs=1e-12)
        assert max(map(len, together["evaluated"])) - min(map(len, together["evaluated"])) <= 1
        assert [row for part in together["evaluated"] for row in part] == alone["evaluated"][0]


@pytest.mark.parametrize("loss", ["clipped", "ranking"])
def test_every_placement_gives_the_same_gradient(outcomes, loss):
    for ranks in outcomes:
        for kind in ("spread", "shuffled"):
            assert_close(
                outcomes[ranks][f"{kind} {loss}"]["gradient"],
                outcomes[1][f"whole {loss}"]["gradient"],
                rtol=0,
                atol=1e-10,
            )


def test_weights_are_bit_identical_on_all_ranks(outcomes):
    for ranks, by_name in outcomes.items():
        for outcome in by_name.values():
            assert len(outcome["all_weights"]) == ranks
            assert all(torch.equal(weights, outcome["weights"]) for weights in outcome["all_weights"])


def test_the_command_line_runs_on_two_ranks_and_resumes_there(tmp_path):
    program = ["-m", "groupwise", "train", "fakes:recipe", "--run-dir", tmp_path / "run", "--conditions-per-step", "8"]
    first = on_ranks(2, [*program, "--steps", "4", "--json"])
    assert first.returncode == 0, first.stderr[-3000:]
    assert json.loads(first.stdout)["steps"] == 4  # one object, from one rank
    again = on_ranks(2, [*program, "--steps", "6", "--placement", "whole", "--resume", "--json"])
    assert again.returncode == 0, again.stderr[-3000:]
    assert json.loads(again.stdout)["steps"] == 6
    refused = on_ranks(2, [*program, "--json"])
    assert refused.returncode != 0
    assert "already holds a run" in refused.stderr


def test_resumed_on_another_number_of_ranks_it_is_the_same_run_to_rounding(tmp_path):
    program = ["-m", "groupwise", "train", "fakes:recipe", "--placement", "shuffled"]
    for ranks, steps in ((2, 4), (1, 6)):
        ended = on_ranks(ranks, [*program, "--run-dir", tmp_path / "moved", "--steps", steps, "--resume"])
        assert ended.returncode == 0, ended.stderr[-3000:]
    # the learning rate falls over --steps, so the straight run is stretched in the same way
    for steps in (4, 6):
        ended = on_ranks(1, [*program, "--run-dir", tmp_path / "straight", "--steps", steps, "--resume"])
        assert ended.returncode == 0, ended.stderr[-3000:]
    moved, straight = (
        load_file(tmp_path / name / "checkpoints" / "step-000006" / "policy.safetensors")
        for name in ("moved", "straight")
    )
    for name in straight:
        assert_close(moved[name], straight[name], rtol=0, atol=1e-12)


def test_accelerate_launches_it_too(tmp_path):
    program = ["-m", "groupwise", "train", "fakes:recipe", "--run-dir", tmp_path / "run", "--steps", "2"]
    ended = on_ranks(2, program, launcher="accelerate")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "2 ranks" in ended.stderr
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 2


ONE_RANK_FAILS = """
import os, fakes, groupwise as gw
from dataclasses import dataclass

class Fails(fakes.TinyWorkload):
    calls = 0
    def rewards(self, rollouts):
        self.calls += 1
        terms = super().rewards(rollouts)
        if self.calls == 5 and os.environ["RANK"] == "1":
            return gw.RewardTerms({"share": terms.per_rollout["share"][1:]})
        return terms

@dataclass(frozen=True)
class FailsConfig(fakes.TinyConfig):
    def build(self, device):
        return Fails(self, device)

def recipe():
    from dataclasses import replace
    return replace(fakes.recipe(), workload=FailsConfig(), run=gw.RunConfig(checkpoint_every=100))
"""


def test_a_mistake_on_one_rank_is_everyones_and_nothing_is_lost(tmp_path):
    (tmp_path / "fails.py").write_text(ONE_RANK_FAILS)
    program = ["-m", "groupwise", "train", tmp_path / "fails.py", "--run-dir", tmp_path / "run", "--json"]
    ended = on_ranks(2, program, seconds=90)
    assert ended.returncode != 0
    for rank in (0, 1):
        assert f"groupwise (rank {rank}): Reward 'share' has shape (15,) for 16 rows" in ended.stderr
    assert "Connection closed" not in ended.stderr
    assert "has shape (15,)" in json.loads(ended.stdout)["error"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]


def test_when_only_the_first_rank_sees_the_damage_nobody_waits(tmp_path):
    (tmp_path / "run" / "checkpoints" / "step-000002").mkdir(parents=True)
    program = ["-m", "groupwise", "train", "fakes:recipe", "--run-dir", tmp_path / "run", "--resume"]
    ended = on_ranks(2, program, seconds=60)
    assert ended.returncode != 0
    for rank in (0, 1):
        assert f"groupwise (rank {rank}): Every checkpoint in" in ended.stderr


def test_ranks_with_other_weights_are_found(tmp_path):
    program = tmp_path / "apart.py"
    program.write_text(
        "from dataclasses import replace\n"
        "import fakes, torch\n"
        "from groupwise.training.run import check\n"
        "from groupwise.dist.comm import connect, disconnect, exit_now\n"
        "comm, build = connect(), fakes.TinyConfig.build\n"
        "def apart(self, device):\n"
        "    workload = build(self, device)\n"
        "    torch.nn.init.constant_(workload.policy.head.bias, comm.rank)\n"
        "    return workload\n"
        "fakes.TinyConfig.build = apart\n"
        "checks, is_main = check(fakes.recipe())\n"
        "if is_main: print([check.detail for check in checks if not check.passed])\n"
        "disconnect()\n"
        "exit_now()\n"
    )
    ended = on_ranks(2, [program])
    assert "ranks [1] hold other weights than rank 0" in ended.stdout, ended.stderr[-2000:]


def test_exit_now_flushes_output_and_runs_exit_functions():
    program = (
        "import atexit, threading, time\n"
        "from groupwise.dist.comm import exit_now\n"
        "atexit.register(print, 'bye', end='')\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"  # one that outlives it
        "print('done', end=' ')\n"
        "exit_now()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=50, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "done bye"), ended.stderr[-2000:]
