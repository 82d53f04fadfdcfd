"""A disk that is full, fails or may not be written: one sentence with the path, and nothing lost but the step."""

import errno
import io
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import recipe
from processes import groupwise, start, wait_for_steps

from groupwise.cli.main import main
from groupwise.core.errors import UserError
from groupwise.core.io.files import read_jsonl
from groupwise.training.run import train

STEPS = 4
CALLS = ("open", "fsync", "replace", "rename", "mkdir")
CHECKPOINT_FILES = ("policy.safetensors", "optimizer.safetensors", "ema.safetensors")
NOBODY = 65534
AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


class FailingDisk:
    """Fails the n-th call that writes below a folder, and the later ones until it is mended."""

    def __init__(self, monkeypatch, folder, fails_at, error):
        self.calls, self._folder, self._fails_at, self._error = 0, str(folder), fails_at, error
        self._inside: set[int] = set()
        for name in CALLS:
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))

    def _failing(self, name, call):
        def faulty(first, *args, **kwargs):
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)
            reads = name == "open" and not (args and args[0] & (os.O_WRONLY | os.O_RDWR))
            if str(path).startswith(self._folder) and not reads and not str(path).endswith(".lock"):
                self.calls += 1
                if self.calls >= self._fails_at:
                    raise OSError(self._error, os.strerror(self._error), *([] if name == "fsync" else [str(path)]))
            return call(first, *args, **kwargs)

        return faulty


def configured(folder, *, resume=False):
    config = recipe()
    run = replace(config.run, run_dir=folder, checkpoint_every=2, preflight=False, resume=resume)
    return replace(config, steps=STEPS, run=run)


def result_of(folder):
    checkpoint = folder / "checkpoints" / f"step-{STEPS:06d}"
    rewards = [(entry["step"], entry["reward"]) for entry in read_jsonl(folder / "metrics.jsonl")]
    return rewards, [(checkpoint / name).read_bytes() for name in CHECKPOINT_FILES]


def test_a_disk_that_fails_at_any_write_costs_no_more_than_a_resume(tmp_path, monkeypatch):
    train(configured(tmp_path / "unbroken"))
    with monkeypatch.context() as patch:
        disk = FailingDisk(patch, tmp_path / "counted", 10**9, errno.EIO)
        train(configured(tmp_path / "counted"))
    assert disk.calls > 40
    for fails_at in range(1, disk.calls + 1, 5):
        error, folder = (errno.ENOSPC, errno.EIO)[fails_at % 2], tmp_path / str(fails_at)
        with monkeypatch.context() as patch:
            FailingDisk(patch, folder, fails_at, error)
            with pytest.raises((OSError, UserError)) as raised:
                train(configured(folder))
        assert str(folder) in str(raised.value)
        train(configured(folder, resume=True))
        assert result_of(folder) == result_of(tmp_path / "unbroken"), fails_at


def test_the_command_line_says_it_in_one_sentence(tmp_path, monkeypatch):
    for fails_at in (2, 20):
        stderr = io.StringIO()
        with monkeypatch.context() as patch, redirect_stderr(stderr):
            FailingDisk(patch, tmp_path / str(fails_at), fails_at, errno.ENOSPC)
            code = main(["train", "fakes:recipe", "--run-dir", str(tmp_path / str(fails_at))])
        assert code == 2
        assert "No space left on device" in stderr.getvalue().splitlines()[-1]
        assert "Traceback" not in stderr.getvalue()


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = AS_ROOT and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder], check=False)
    if not mounted or mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_really_full_then_larger(tmp_path, small_disk):
    arguments = ["train", "fakes:recipe", "--steps", "30", "--samples-per-step", "32", "--run-dir"]
    stderr = io.StringIO()
    with redirect_stderr(stderr):
        assert main([*arguments, str(small_disk / "run")]) == 2
        assert main([*arguments, str(tmp_path / "unbroken")]) == 0
    assert (
        "cannot be used: No space left on device. What was complete is kept; --resume continues." in stderr.getvalue()
    )
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    with redirect_stderr(stderr):
        assert main([*arguments, str(small_disk / "run"), "--resume"]) == 0
    ends = (
        run / "checkpoints" / "step-000030" / "policy.safetensors"
        for run in (small_disk / "run", tmp_path / "unbroken")
    )
    first, second = (path.read_bytes() for path in ends)
    assert first == second


@pytest.mark.skipif(not AS_ROOT, reason="becoming another user needs root")
def test_a_folder_that_another_user_may_only_read(request):
    """In a forked child, which has imported everything: another user may not be able to read this installation."""
    # Not in tmp_path: another user may not go through its parents.
    shared = Path(tempfile.mkdtemp())
    request.addfinalizer(lambda: shutil.rmtree(shared))
    folder, messages = shared / "owned", shared / "messages"
    arguments = ["train", "fakes:recipe", "--run-dir", str(folder), "--resume"]
    assert main(arguments) == 0
    assert main([*arguments, "--steps", "7"]) == 0
    messages.touch()
    messages.chmod(0o666)
    shared.chmod(0o755)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with open(messages, "w") as sys.stderr:
                code = main([*arguments, "--steps", "8"])
        finally:  # whatever happens, this process must not go on with the tests
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2, messages.read_text()
    assert f"groupwise: The run folder {folder} cannot be written (Permission denied)." in messages.read_text()
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_that_is_moved_during_the_run_is_continued_from_its_new_place(tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    process = start("train", "fakes:slow_recipe", "--run-dir", folder)
    wait_for_steps(folder, 3, process)
    folder.rename(moved)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "has been moved or deleted" in " ".join(stderr.split())
    assert "Traceback" not in stderr
    assert not folder.exists()
    ended = groupwise("train", "fakes:slow_recipe", "--run-dir", moved, "--resume")
    assert ended.returncode == 0, ended.stderr
    assert [entry["step"] for entry in read_jsonl(moved / "metrics.jsonl")] == list(range(14))
