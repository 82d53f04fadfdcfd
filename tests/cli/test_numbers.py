"""Numbers and paths beyond all reason: exit code 2 within a second, before anything is allocated."""

import functools
import io
import json
import math
import operator
import shutil
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from importlib import import_module

import pytest
from fakes import recipe
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.cli.main import main
from groupwise.core.errors import UserError
from groupwise.core.shape import MAX_ROLLOUTS_PER_STEP, StepShape
from groupwise.recipes import load_recipe
from groupwise.training.config import MAX_THREADS, RunConfig

THIRTY_DIGITS = "9" * 30
LONG = "a" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        "place --ranks 9223372036854775807",
        "place --conditions 100000000",
        f"place --group-size {THIRTY_DIGITS}",
        f"place --step {THIRTY_DIGITS}",
        f"place --dataset {THIRTY_DIGITS}",
        f"place --rows-per-pass {THIRTY_DIGITS}",
        "place --ranks 4096 --conditions 1000000 --group-size 64",
        "plan chat --ranks 9223372036854775807",
        "plan chat --group-size 100000000",
        f"plan chat --group-size {THIRTY_DIGITS}",
        f"plan chat --device-memory {'9' * 400}GiB",
        f"train fakes:recipe --group-size {THIRTY_DIGITS}",
        "train fakes:recipe --threads 100000",
        f"train fakes:recipe --steps {THIRTY_DIGITS}",
        f"train fakes:recipe --samples-per-step {THIRTY_DIGITS}",
        f"train fakes:recipe --optimizer.updates-per-step {THIRTY_DIGITS}",
        f"train {LONG}.py",
        f"report {LONG}",
        f"eval {LONG}",
        f"plan {LONG}",
        "report a\0b",
        "train \0.py",
        "train x\udcff.py",
        "train fakes:recipe --run-dir ",
        "train fakes:recipe --run-dir=",
        "export  ",
    ],
    ids=lambda text: ascii(text[:60]),
)
def test_refused_at_once(arguments, capsys):
    main(["place"])  # what is imported once does not count
    capsys.readouterr()
    start = time.process_time()
    assert main(arguments.split(" ")) == 2
    assert time.process_time() - start < 1
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert len(message) < 3000


@pytest.mark.parametrize("ranks", [7919, 2**19 - 1, 2**20])
def test_a_refusal_with_large_numbers_searches_for_a_bounded_time(ranks):
    start = time.process_time()
    with pytest.raises(UserError, match="ranks"):
        StepShape(10**6, 1000, 1000, ranks)
    assert time.process_time() - start < 2


def test_the_largest_values_are_taken():
    assert StepShape(10**12, MAX_ROLLOUTS_PER_STEP // 2, 2).rollouts_per_step == MAX_ROLLOUTS_PER_STEP
    assert RunConfig(threads=MAX_THREADS).threads == 1024
    with pytest.raises(UserError, match="threads is 1025: it must be from 1 to 1,024"):
        RunConfig(threads=MAX_THREADS + 1)


RECIPES = ("controller", "chat", "flow", "flow-image", "examples/doors.py")
ARGUMENTS = {"place": "PlaceArguments", "measure": "MeasureArguments", "profile": "ProfileArguments"}
HUGE = (THIRTY_DIGITS, "9" * 400, f"-{THIRTY_DIGITS}")


def numeric_flags(settings, prefix=""):
    """Of a config or the class of a command's arguments."""
    for field in fields(settings):
        value, name = getattr(settings, field.name, None), f"{prefix}{field.name}".replace("_", "-")
        if is_dataclass(value):
            yield from numeric_flags(value, "" if field.name == "run" else f"{name}.")
        elif any(word in str(field.type).replace("|", " ").split() for word in ("int", "float")):
            yield f"--{name}"


@st.composite
def numeric_arguments(draw):
    """A number beyond all reason, or one out of its range, for any numeric flag of any recipe or command."""
    command = draw(st.sampled_from([*RECIPES, *ARGUMENTS]))
    if command in RECIPES:
        flag = draw(st.sampled_from(sorted(numeric_flags(load_recipe(command)))))
        return ["plan", command, f"{flag}={draw(st.sampled_from([*HUGE, '-1', '0', '1e400', 'nan', '1e30']))}"]
    kind = getattr(import_module(f"groupwise.cli.{command}"), ARGUMENTS[command])
    return [command, f"{draw(st.sampled_from(sorted(numeric_flags(kind))))}={draw(st.sampled_from(HUGE))}"]


def called_within_seconds(arguments):
    """The exit code of a command that is over at once, with a message of bounded length."""
    start = time.process_time()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as messages:
        code = main([str(word) for word in arguments])
    assert time.process_time() - start < 2  # a second on a machine without other work; the first one imports torch
    assert len(messages.getvalue()) < 5000
    return code


@settings(max_examples=40, deadline=None)
@given(numeric_arguments())
def test_any_number_for_any_flag_is_used_or_refused_within_a_second(arguments):
    assert called_within_seconds(arguments) in ((0, 2) if arguments[0] == "plan" else (2,))


TRAINED_FLAGS = [flag for flag in numeric_flags(recipe()) if "workload" not in flag]


def numbers_in(settings, path=()):
    """The paths of all numbers in nested settings."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from numbers_in(value, (*path, name))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*path, name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers") / "run"
    assert main(["train", "fakes:recipe", "--run-dir", str(folder), "--no-preflight", "--steps", "1"]) == 0
    return folder


@settings(max_examples=15, deadline=None)
@given(flag=st.sampled_from(TRAINED_FLAGS), value=st.sampled_from([*HUGE, "-1", "0", "1e400", "nan", "1e30", "-1e-30"]))
@pytest.mark.usefixtures("trained")  # what is imported once does not count
def test_any_number_for_a_flag_of_train_trains_a_step_or_is_refused(tmp_path_factory, flag, value):
    folder = tmp_path_factory.mktemp("number") / "run"
    words = ["train", "fakes:recipe", "--run-dir", folder, "--no-preflight", "--steps", 1, f"{flag}={value}"]
    assert called_within_seconds(words) in (0, 2)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), command=st.sampled_from(["eval", "report", "export"]))
def test_any_number_in_the_settings_of_a_run_is_used_or_refused(trained, tmp_path_factory, data, command):
    config = json.loads((trained / "config.json").read_text())
    *parents, name = data.draw(st.sampled_from(sorted(numbers_in(config))))
    inner = functools.reduce(operator.getitem, parents, config)
    inner[name] = data.draw(st.sampled_from([10**30, -(10**30), -1, 0, 1e30, math.inf, math.nan, 10**400]))
    run = tmp_path_factory.mktemp("numbers") / "run"
    shutil.copytree(trained, run)
    (run / "config.json").write_text(json.dumps(config))
    words = {"eval": ["eval", run, "--recipe", "fakes:recipe"], "report": ["report", run]}
    assert called_within_seconds(words.get(command, ["export", run, run / "model"])) in (0, 2)
