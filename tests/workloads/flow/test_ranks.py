"""flow-recam's numbers on 8 real ranks: 8 conditions x 4 members = 32 rollouts = 8 ranks x 2 passes x 2 rows."""

from pathlib import Path

import pytest
import torch
from processes import on_ranks
from torch.testing import assert_close

from workloads.flow.ranks import PLACEMENTS, outcome


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "eight.pt"
    ended = on_ranks(8, [Path(__file__).with_name("ranks.py"), path], seconds=400)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return torch.load(path)


@pytest.fixture(scope="module")
def one():
    return outcome("whole")


@pytest.mark.timeout(450)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_eight_ranks_do_what_one_does(eight, one, placement):
    result = eight[placement]
    assert result["shape"] == (32, 2, 8)
    ids, advantages = result["ids"].view(8, 4), result["advantages"].view(8, 4)
    assert (ids == ids[:, :1]).all()  # each condition's four members
    assert len(ids[:, 0].unique()) == 8
    assert_close(advantages.mean(1), torch.zeros(8, dtype=torch.float64), rtol=0, atol=1e-9)
    assert (result["everyone"] == result["advantages"]).all()  # identical on every rank
    assert (result["all weights"] == result["weights"]).all()
    assert torch.equal(result["ids"], one["ids"])
    assert_close(result["latents"], one["latents"], rtol=0, atol=1e-5)
    assert_close(result["rewards"], one["rewards"], rtol=0, atol=1e-6)
    assert_close(result["weights"], one["weights"], rtol=0, atol=2e-5)
