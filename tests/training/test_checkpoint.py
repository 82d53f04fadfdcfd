"""A crash at any line of writing a checkpoint never costs the last good one."""

import json
import shutil
import sys
import threading

import pytest
import torch
from torch import nn

from groupwise.core.errors import UserError
from groupwise.core.io import files
from groupwise.training.config import OptimizerConfig
from groupwise.training.run_folder import checkpoint, checkpoint_writer
from groupwise.training.run_folder.checkpoint import restore
from groupwise.training.run_folder.checkpoint_writer import CheckpointWriter, write_checkpoint
from groupwise.training.state import create_state
from groupwise.workloads import checkpoint_files
from groupwise.workloads.checkpoint_files import newest_valid_checkpoint

TRACED = [module.__file__ for module in (checkpoint, checkpoint_writer, checkpoint_files, files)]


class PowerCut(BaseException):
    """Nothing may catch it, as nothing catches a kill."""


def state_at(step):
    torch.manual_seed(step)
    state = create_state(nn.Linear(2, 2), OptimizerConfig(ema_decay=0.5))
    state.step = step
    return state


def write(folder, step, keep=2):
    return write_checkpoint(folder, state_at(step), config={}, ranks=1, keep=keep)


def waits_for_writer():
    """A power cut would end the other thread, too: so it comes while that one writes, or when it is done."""
    writing = [thread for thread in threading.enumerate() if thread.name == "checkpoint writer"]
    return bool(writing) and threading.current_thread() not in writing


def crash_at_line(line, act):
    """Cut the power before the line with this number among all that are executed in TRACED. False if it ended first."""
    executed = 0

    def trace(frame, event, _):
        nonlocal executed
        if frame.f_code.co_filename not in TRACED or frame.f_code is CheckpointWriter._run.__code__:
            return None  # the latter carries what cuts the thread short to the test
        if event == "line" and not waits_for_writer():
            executed += 1
            if executed == line:
                raise PowerCut
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        act()
    except PowerCut:
        return True
    finally:
        sys.settrace(before)
        threading.settrace(None)
    return False


@pytest.mark.parametrize("step", [6, 7])
def test_a_crash_at_any_line_leaves_a_good_checkpoint(tmp_path, step):
    line = 0
    write(tmp_path / "written", 5, keep=1)
    write(tmp_path / "written", 6, keep=1)
    while True:
        line += 1
        folder = tmp_path / str(line)
        shutil.copytree(tmp_path / "written", folder)
        crashed = crash_at_line(line, lambda folder=folder: write(folder, step, keep=1))
        newest = newest_valid_checkpoint(folder, pytest.fail)
        assert newest is not None
        assert newest.name in ("step-000006", f"step-{step:06d}")
        restored = state_at(1)
        restore(newest, restored)
        assert torch.equal(restored.policy.weight, state_at(int(newest.name[5:])).policy.weight)
        write(folder, 9, keep=1)  # and the next one sweeps up
        assert [path.name for path in folder.iterdir()] == ["step-000009"]
        if not crashed:
            break
    assert line > {6: 10, 7: 50}[step]


def test_the_newest_are_the_highest_steps_whatever_their_digits(tmp_path):
    for step in (999_998, 999_999, 1_000_000):
        write(tmp_path, step)
    assert {path.name for path in tmp_path.iterdir()} == {"step-999999", "step-1000000"}


@pytest.mark.parametrize("damage", ['"step": 7', "[]", ""])
def test_a_damaged_description_is_damage(tmp_path, damage):
    write(tmp_path, 5)
    meta = write(tmp_path, 6) / "checkpoint.json"
    meta.write_text(meta.read_text().replace('"step": 6', damage) if "step" in damage else damage)
    warned = []
    assert newest_valid_checkpoint(tmp_path, warned.append).name == "step-000005"
    assert "step-000006 is damaged" in warned[0]


def test_when_all_are_damaged_no_run_is_started_over(tmp_path):
    (write(tmp_path, 5) / "optimizer.safetensors").unlink()
    with pytest.raises(UserError, match=r"Every checkpoint .* is damaged"):
        newest_valid_checkpoint(tmp_path, lambda text: None)
    assert newest_valid_checkpoint(tmp_path / "nowhere", lambda text: None) is None


def test_a_checkpoint_names_what_made_it(tmp_path):
    meta = json.loads((write(tmp_path, 5) / "checkpoint.json").read_text())
    assert set(meta["sha256"]) == {"policy.safetensors", "optimizer.safetensors", "ema.safetensors", "checkpoint.json"}


@pytest.mark.parametrize("offload", [False, True])
def test_moments_may_move_to_the_host_and_back(tmp_path, offload):
    states = [create_state(nn.Linear(2, 2), OptimizerConfig(offload=each)) for each in (offload, not offload)]
    written, resumed = states
    assert (written.offloaded, resumed.offloaded) == (offload, not offload)
    written.policy(torch.ones(1, 2)).sum().backward()
    written.optimizer.step()
    restore(write_checkpoint(tmp_path, written, config={}, ranks=1, keep=1), resumed)
    for state in states:
        state.optimizer.zero_grad()
        state.policy(torch.full((1, 2), 0.3)).sum().backward()
        state.optimizer.step()
    assert torch.equal(written.policy.weight, resumed.policy.weight)


def test_whether_a_step_is_fused_depends_on_the_device_that_resumes(tmp_path):
    written, resumed = state_at(3), state_at(4)
    for group in written.optimizer.param_groups:
        group["fused"] = None  # as where torch has no fused AdamW
    written.policy(torch.ones(1, 2)).sum().backward()
    written.optimizer.step()
    restore(write_checkpoint(tmp_path, written, config={}, ranks=1, keep=1), resumed)
    assert resumed.fused
    assert [group["fused"] for group in resumed.optimizer.param_groups] == [True]
    for before, after in zip(written.trainable, resumed.trainable, strict=True):
        for name, value in written.optimizer.state[before].items():
            assert torch.equal(resumed.optimizer.state[after][name], value)
