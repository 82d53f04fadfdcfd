"""Two ranks on the emulated device: sums through the host, and agreement on failures."""

import pytest
import torch
from processes import ENVIRONMENT, on_ranks

from accelerator import emulated
from accelerator.command import RECIPE
from groupwise.core.io.files import read_jsonl

MISSING = emulated.missing_tools()
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(bool(MISSING), reason=f"the emulated accelerator cannot be built without {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return _run(1, "plain", tmp_path_factory.mktemp("single"))


def _run(ranks, case, folder):
    output = folder / "weights.pt"
    ended = on_ranks(ranks, ["-m", "accelerator.ranks", output, case])
    assert ended.returncode == 0, ended.stderr[-3000:]
    return torch.load(output) if output.exists() else None


@pytest.mark.parametrize("case", ["plain", "oom"])
def test_two_ranks_train_the_same_weights_as_one(single, tmp_path, case):
    both = _run(2, case, tmp_path)
    assert (both["retries"] > 0) == (case == "oom")
    for name, weight in single["weights"].items():
        torch.testing.assert_close(both["weights"][name], weight, rtol=1e-5, atol=1e-6)


def test_ranks_on_different_devices_are_refused_on_all(tmp_path):
    assert _run(2, "mixed", tmp_path) is None
    for rank in (0, 1):
        message = (tmp_path / f"weights.{rank}").read_text()
        assert f"{emulated.NAME}: ranks 0; cpu: ranks 1" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_when_a_rank_loses_its_device_both_end_and_the_run_can_be_resumed(tmp_path, monkeypatch, rank):
    monkeypatch.setitem(ENVIRONMENT, "GROUPWISE_TEST_RECIPE", "doors")
    train = ["train", RECIPE, "--run-dir", tmp_path / "run"]
    ended = on_ranks(2, ["-m", "accelerator.command", "--lose", f"update:1:{rank}", *train])
    assert ended.returncode != 0
    assert f"groupwise (rank {rank}): The device {emulated.NAME}:0 of rank {rank} has failed at step 1" in ended.stderr
    assert f"groupwise (rank {1 - rank}): " in ended.stderr  # the other one ends too, with the same or the lost rank
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    resumed = on_ranks(2, ["-m", "accelerator.command", *train, "--resume"])
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 2
