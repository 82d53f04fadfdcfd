"""Checkpoints are written beside training: from a copy, one at a time; a kill or an error leaves the last one."""

import os
import signal
import threading
import time

import pytest
import torch
from fakes import recipe
from test_checkpoint import state_at
from test_disk import configured, result_of

from groupwise.core.errors import UserError
from groupwise.core.io.files import read_jsonl
from groupwise.dist.comm import Comm
from groupwise.training.run import train
from groupwise.training.run_folder.checkpoint import restore
from groupwise.training.run_folder.checkpoint_writer import CheckpointWriter
from groupwise.workloads.checkpoint_files import newest_valid_checkpoint


class StuckDisk:
    """Syncs of files whose path has a part wait until the disk goes on."""

    def __init__(self, monkeypatch, part):
        self._part, self.goes_on, self._sync = part, threading.Event(), os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, descriptor):
        if self._part in os.readlink(f"/proc/self/fd/{descriptor}"):
            self.goes_on.wait(60)
        self._sync(descriptor)


def trained_state(step):
    state = state_at(step)
    state.policy(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    return state


def tensors_of(state):
    moments = [fields[name] for fields in state.optimizer.state.values() for name in sorted(fields)]
    return [*state.policy.state_dict().values(), *state.ema.weights.values(), *moments]


def test_what_is_written_is_the_state_at_the_start_whatever_training_does_meanwhile(tmp_path, monkeypatch):
    disk, state, restored = StuckDisk(monkeypatch, ".writing-step"), trained_state(3), state_at(4)
    expected = [tensor.clone() for tensor in tensors_of(state)]
    writer = CheckpointWriter(tmp_path, Comm(0, 1, torch.device("cpu")), keep=1)
    path = writer.start(state, config={}, ranks=1)
    assert not writer.poll()
    for tensor in tensors_of(state):
        tensor.add_(1.0)
    assert newest_valid_checkpoint(tmp_path, pytest.fail) is None
    disk.goes_on.set()
    writer.wait()
    assert newest_valid_checkpoint(tmp_path, pytest.fail) == path
    restore(path, restored)
    assert len(expected) == 2 + 2 + 6
    assert all(torch.equal(ours, then) for ours, then in zip(tensors_of(restored), expected, strict=True))


def test_the_next_checkpoint_waits_for_the_one_before(tmp_path, monkeypatch):
    disk = StuckDisk(monkeypatch, ".writing-step-000003")
    writer = CheckpointWriter(tmp_path, Comm(0, 1, torch.device("cpu")), keep=5)
    writer.start(state_at(3), config={}, ranks=1)
    timer = threading.Timer(0.3, disk.goes_on.set)
    timer.start()
    writer.start(state_at(4), config={}, ranks=1)
    assert disk.goes_on.is_set()
    assert (tmp_path / "step-000003").is_dir()
    writer.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_an_error_is_raised_in_the_main_thread_and_stopping_leaves_no_checkpoint(tmp_path, monkeypatch):
    disk = StuckDisk(monkeypatch, ".writing-step")
    writer = CheckpointWriter(tmp_path / "sub", Comm(0, 1, torch.device("cpu")), keep=5)
    writer.start(state_at(3), config={}, ranks=1)
    (tmp_path / "sub").rename(tmp_path / "moved")  # what it writes next is not there
    disk.goes_on.set()
    with pytest.raises(UserError, match="Writing a checkpoint raised FileNotFoundError"):
        writer.wait()
    assert writer.failed
    disk.goes_on.clear()
    threading.Timer(0.2, disk.goes_on.set).start()
    stopped = CheckpointWriter(tmp_path / "other", Comm(0, 1, torch.device("cpu")), keep=5)
    stopped.start(state_at(3), config={}, ranks=1)
    stopped.stop()
    assert newest_valid_checkpoint(tmp_path / "other", pytest.fail) is None


def test_killed_while_a_checkpoint_is_written_it_continues_from_the_one_before(tmp_path, monkeypatch):
    train(configured(tmp_path / "unbroken"))
    folder = tmp_path / "killed"
    child = os.fork()
    if child == 0:
        try:
            StuckDisk(monkeypatch, ".writing-step-000002")
            train(configured(folder))
        finally:  # whatever happens, this process must not go on with the tests
            os._exit(99)
    deadline = time.monotonic() + 60
    while not len(read_jsonl(folder / "metrics.jsonl")) >= 3:  # it trains on while the second step is written
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [".writing-step-000002"]
    train(configured(folder, resume=True))
    assert result_of(folder) == result_of(tmp_path / "unbroken")
    assert not list((folder / "checkpoints").glob(".*"))


def test_a_full_disk_while_writing_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    """The files of the first checkpoint cannot be written; steps are trained until the error is noticed."""
    sync = os.fsync

    def full(descriptor):
        if ".writing-step-000002" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        sync(descriptor)

    config = configured(tmp_path / "full")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"step-000002.* cannot be used: No space left .*; --resume continues\."):
            train(config)
    assert recipe().steps > 2
    assert newest_valid_checkpoint(tmp_path / "full" / "checkpoints", pytest.fail) is None
    train(configured(tmp_path / "full", resume=True))
    train(configured(tmp_path / "unbroken"))
    assert result_of(tmp_path / "full") == result_of(tmp_path / "unbroken")


def test_a_thread_that_cannot_start_is_an_error_and_leaves_nothing_to_wait_for(tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    writer = CheckpointWriter(tmp_path, Comm(0, 1, torch.device("cpu")), keep=1)
    with monkeypatch.context() as without_memory:
        without_memory.setattr(threading.Thread, "start", refuse)
        with pytest.raises(UserError, match="Writing a checkpoint raised RuntimeError: can't start new thread"):
            writer.start(trained_state(3), config={}, ranks=1)
    assert writer.failed
    assert writer.poll()
    assert newest_valid_checkpoint(tmp_path, pytest.fail) is None
