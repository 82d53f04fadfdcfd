"""A device that is lost in mid-run: one paragraph, exit code 2, and the newest checkpoint continues."""

import pytest
import torch
from safetensors.torch import load_file

from accelerator.command import RECIPE, at_stage, lose_device
from groupwise.cli.main import main
from groupwise.core.errors import DeviceLostError, OutOfMemoryError
from groupwise.dist.comm import connect
from groupwise.dist.devices import is_lost
from groupwise.training import loop

STAGES = ("generate_rollouts", "compute_rewards")


@pytest.fixture
def losable(counters):
    yield counters
    counters.lose_after(-1)


def train(folder, *more) -> int:
    return main(["train", RECIPE, "--run-dir", str(folder), *more])


def weights(folder):
    return load_file(folder / "checkpoints" / "step-000002" / "policy.safetensors")


@pytest.mark.parametrize("stage", ["update", *(pytest.param(s, marks=pytest.mark.device) for s in STAGES)])
def test_a_run_whose_device_is_lost_ends_with_a_paragraph_and_can_be_resumed(
    device, losable, tmp_path, monkeypatch, capsys, stage
):
    monkeypatch.setenv("GROUPWISE_TEST_RECIPE", "doors")
    monkeypatch.setattr(loop, stage, getattr(loop, stage))  # put back afterwards
    original = getattr(loop, stage)
    at_stage(stage, 1, lose_device)
    assert train(tmp_path / "lost") == 2
    message = capsys.readouterr().err.splitlines()[-1]
    for part in (f"device {device.type}:0 of rank 0", "at step 1", "unspecified launch failure", "--resume"):
        assert part in message
    assert "Out of memory" not in message
    assert [path.name for path in (tmp_path / "lost" / "checkpoints").iterdir()] == ["step-000001"]
    assert (tmp_path / "lost" / "error.txt").is_file()
    losable.lose_after(-1)
    monkeypatch.setattr(loop, stage, original)
    assert train(tmp_path / "lost", "--resume") == 0
    assert train(tmp_path / "unbroken") == 0
    resumed, unbroken = weights(tmp_path / "lost"), weights(tmp_path / "unbroken")
    assert all(torch.equal(resumed[key], unbroken[key]) for key in unbroken)


def test_a_lost_device_is_not_taken_for_one_that_is_full(device, losable):
    comm, held = connect(device.type), torch.ones(8, device=device)
    losable.lose_after(0)
    assert is_lost(held.device)
    with pytest.raises(DeviceLostError, match="does not answer"), comm.fail_together("a stage"):
        held + 1
    with pytest.raises(DeviceLostError, match="does not answer"), comm.explain_lost_device():
        held + 1
    losable.lose_after(-1)
    losable.set_memory_limit(losable.counters()["live_bytes"] + 1)
    assert not is_lost(held.device)  # full is not lost
    with pytest.raises(OutOfMemoryError), comm.fail_together("a stage"):
        held + 1
    losable.set_memory_limit(0)
    with pytest.raises(RuntimeError, match="same device"), comm.explain_lost_device():
        held + torch.ones(8)
