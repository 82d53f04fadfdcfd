"""Cached answers survive the process, several writers, and a kill in the middle of writing."""

import subprocess
import sys
import time

import pytest
from processes import ENVIRONMENT

from groupwise.core.errors import UserError
from groupwise.core.io.imports import only_named_code
from groupwise.workloads.controller.model.answer_cache import AnswerCache
from groupwise.workloads.controller.model.knobs import Knobs

KNOBS = Knobs("low", 1, 4, 12)
WRITER = """
import sys
from pathlib import Path
from groupwise.workloads.controller.model.answer_cache import AnswerCache
from groupwise.workloads.controller.model.knobs import Knobs
cache = AnswerCache("m", Path(sys.argv[1]))
number, last = int(sys.argv[2]), int(sys.argv[3])
while number < last:
    batch = range(number, number + 10)
    cache.store({(f"sample {n}", Knobs("low", 1, 4, 12)): (n, n + 1) for n in batch})
    number += 10
    print(number, flush=True)
"""


def writer(path, first, last):
    words = [sys.executable, "-c", WRITER, str(path), str(first), str(last)]
    return subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)


def stored(path, count):
    keys = [(f"sample {number}", KNOBS) for number in range(count)]
    return AnswerCache("m", path).lookup(keys)


def test_cached_in_memory_and_on_disk_by_model_sample_and_knobs(tmp_path):
    path = tmp_path / "deep" / "answers.sqlite"
    first = AnswerCache("m", path)
    assert first.lookup([("a", KNOBS)]) == {}
    first.store({("a", KNOBS): (7, 8)})
    assert first.lookup([("a", KNOBS), ("b", KNOBS)]) == {("a", KNOBS): (7, 8)}
    assert AnswerCache("m", path).lookup([("a", KNOBS)]) == {("a", KNOBS): (7, 8)}
    assert AnswerCache("another model", path).lookup([("a", KNOBS)]) == {}
    assert AnswerCache("m", path).lookup([("a", Knobs("low", 1, 4, 13))]) == {}
    assert AnswerCache("m").lookup([("a", KNOBS)]) == {}


def test_several_processes_write_one_file(tmp_path):
    path = tmp_path / "answers.sqlite"
    several = [writer(path, first, first + 200) for first in (0, 100, 200, 300)]
    for process in several:
        process.communicate(timeout=60)
        assert process.returncode == 0
    found = stored(path, 500)
    assert len(found) == 500
    assert all(tokens == (int(name.split()[1]), int(name.split()[1]) + 1) for (name, _), tokens in found.items())


def test_killed_while_writing_the_file_holds_whole_batches(tmp_path):
    path = tmp_path / "answers.sqlite"
    process = writer(path, 0, 10**6)
    for _ in range(20):
        reached = int(process.stdout.readline())
    time.sleep(0.003)
    process.kill()
    process.communicate(timeout=30)
    found = stored(path, reached + 10_000)
    assert len(found) >= reached
    assert len(found) % 10 == 0


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "answers.sqlite").write_text("not a database, but long enough to be looked at as one" * 10)
    with pytest.raises(UserError, match="cannot be used"):
        AnswerCache("m", tmp_path / "answers.sqlite")


def test_a_file_that_only_a_strangers_settings_name_is_read_but_never_written(tmp_path):
    known = AnswerCache("m", tmp_path / "known")
    known.store({("sample", KNOBS): (1, 2)})
    known.close()
    (tmp_path / "secret").write_text("not a database")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with only_named_code(()):
        for name, count in (("known", 1), ("secret", 0), ("absent/new", 0)):
            cache = AnswerCache("m", tmp_path / name)
            assert len(cache.lookup([("sample", KNOBS)])) == count
            cache.store({("another", KNOBS): (3,)})
            assert cache.lookup([("another", KNOBS)]) == {("another", KNOBS): (3,)}  # in memory
            cache.close()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
