"""Atomic files, JSON without NaN, and logs whose last line a crash cut short."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from groupwise.core.errors import UserError
from groupwise.core.io.files import append_jsonl, cache_folder, read_jsonl, to_json, user_path, write_atomic


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomic(path, b"old")

    def crash(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_file_and_folder_reach_the_disk_in_order(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    monkeypatch.setattr(
        type(tmp_path), "replace", lambda source, target: events.append(("replace", str(target))) or None
    )
    write_atomic(tmp_path / "a", b"x")
    assert events == [str(tmp_path / ".a.new"), ("replace", str(tmp_path / "a")), str(tmp_path)]


def test_json_has_no_nan(tmp_path):
    content = {"a": math.nan, "b": [1.5, -math.inf], "c": {"d": (math.inf,)}, "e": torch.tensor([1.0, math.nan])}
    assert json.loads(to_json(content)) == {"a": None, "b": [1.5, None], "c": {"d": [None]}, "e": [1.0, None]}
    assert json.loads(to_json({"f": np.float64(2.5), "p": tmp_path})) == {"f": 2.5, "p": str(tmp_path)}


def test_a_last_line_that_was_cut_short_is_ignored(tmp_path):
    path = tmp_path / "log.jsonl"
    assert read_jsonl(path) == []
    append_jsonl(path, [{"step": 0, "loss": math.nan}, {"step": 1}])
    append_jsonl(path, [{"step": 2}])
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert read_jsonl(path) == [{"step": 0, "loss": None}, {"step": 1}, {"step": 2}]


def test_a_home_that_is_not_there_is_no_traceback(monkeypatch):
    assert user_path("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")
    monkeypatch.delenv("GROUPWISE_CACHE", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)  # a user without an entry, as in containers
    with pytest.raises(UserError, match="GROUPWISE_CACHE"):
        cache_folder()
