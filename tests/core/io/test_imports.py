"""Objects named by a user: from modules and files, with errors that say what to change."""

import sys

import pytest

from groupwise.core.errors import UserError
from groupwise.core.io.imports import import_function, import_object


@pytest.fixture
def folder(tmp_path, monkeypatch):
    before = set(sys.modules), list(sys.path)
    (tmp_path / "neighbor_x.py").write_text("value = 7\n")
    (tmp_path / "mine_x.py").write_text(
        "from neighbor_x import value\ncalls = []\ndef f():\n    calls.append(1)\n    return len(calls)\n"
    )
    (tmp_path / "raises_x.py").write_text("\n1 / 0\n")
    (tmp_path / "needs_x.py").write_text("import no_such_library\n")
    (tmp_path / "syntax_x.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before[0]:
        del sys.modules[name]
    sys.path[:] = before[1]


@pytest.mark.parametrize("spec", ["mine_x:f", "mine_x.py:f"])
def test_from_the_current_folder(folder, spec):
    assert import_function(spec, "s")() == 1


def test_from_a_file_elsewhere_with_its_neighbors(folder, monkeypatch):
    monkeypatch.chdir("/")
    assert import_object(f"{folder}/mine_x.py:value", "s") == 7
    assert import_object(f"{folder}/mine_x.py", "s", default_name="value") == 7


def test_a_file_runs_once_until_it_changes(folder):
    first = import_object("mine_x.py:calls", "s")
    assert import_object("./mine_x.py:calls", "s") is first
    (folder / "mine_x.py").write_text("calls = 'new'\n")
    assert import_object("mine_x.py:calls", "s") == "new"


def test_a_file_does_not_replace_a_module_of_the_same_name(folder):
    import json

    (folder / "json.py").write_text("value = 3\n")
    assert import_object("json.py:value", "s") == 3
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            "plain",
            r"^reward 'plain' must be one of a, b, or an object of your own, written as 'module:name' or 'file.py",
        ),
        (":f", "written as 'module:name'"),
        ("mine_x:", "written as 'module:name'"),
        ("mine_x.py", "written as 'module:name'"),
        ("no_such_x:f", r"^reward 'no_such_x:f' cannot be imported. No module named 'no_such_x'. Check the spelling"),
        ("no_such.py:f", r"cannot be imported. There is no file no_such.py. Check the path, relative to "),
        ("mine_x:g", "cannot be imported. mine_x has no 'g'"),
        ("raises_x:f", r"The module raises_x raised ZeroDivisionError: division by zero \(.*raises_x.py:2\)"),
        ("raises_x.py:f", r"The file raises_x.py raised ZeroDivisionError: division by zero \(.*raises_x.py:2\)"),
        ("needs_x:f", r"raised ModuleNotFoundError: No module named 'no_such_library' \(.*needs_x.py:1\)"),
        ("syntax_x.py:f", r"has a syntax error: .* \(.*syntax_x.py:1\)"),
        ("mine_x:value", "is int, which cannot be called"),
    ],
)
def test_errors_name_the_setting_the_value_and_the_remedy(folder, spec, says):
    with pytest.raises(UserError, match=says):
        import_function(spec, "reward", known=["a", "b"])
