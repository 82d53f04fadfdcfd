"""A run folder from somebody else, or after a power cut: nothing runs, nothing outside is touched, no traceback."""

import ast
import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from fakes import recipe
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from strangers import DEEP, HOSTILE, PARTS, change_metadata, hash_tensor_files, rewrite, split_into_parts

from groupwise.cli.main import main
from groupwise.core.errors import UserError
from groupwise.training.config import OptimizerConfig
from groupwise.training.run_folder.checkpoint import all_tensors, restore
from groupwise.training.run_folder.checkpoint_writer import write_checkpoint
from groupwise.training.state import create_state
from groupwise.workloads.checkpoint_files import checkpoint_errors, newest_valid_checkpoint

SOURCES = Path(__file__).parents[2] / "src"
RESUME = ("train", "fakes:recipe", "--run-dir", "RUN", "--resume", "--steps", "4")
REPORT = ("report", "RUN")
EVAL = ("eval", "RUN", "--recipe", "fakes:recipe")
SECRET = "what the folder must not reach"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", "fakes:recipe", "--run-dir", str(folder), "--steps", "4"]) == 0
    return folder


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return path


def call(command, run):
    return main([str(run) if word == "RUN" else word for word in command])


def checkpoint(run, step):
    return run / "checkpoints" / f"step-{step:06d}"


# Code


def test_no_pickle_is_read_or_written_anywhere():
    # ReCamMaster's own checkpoints are files of torch.save: written for it, and read with weights_only
    of_recam = {SOURCES / "groupwise" / "workloads" / "flow" / name for name in ("export.py", "models/checkpoints.py")}
    for path in set(SOURCES.rglob("*.py")) - of_recam:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "joblib", "shelve", "marshal", "dill"} & set(names), path
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("torch.load", "torch.save"), f"{path}:{node.lineno}"
            assert "allow_pickle=True" not in (ast.unparse(node) if called == "np.load" else ""), path


class Poison:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["policy.safetensors", "optimizer.safetensors", "ema.safetensors"])
def test_a_poisoned_file_with_the_right_hash_runs_nothing(run, tmp_path, capsys, name):
    poison = pickle.dumps(Poison(tmp_path / "ran"))
    pickle.loads(poison)
    (tmp_path / "ran").unlink()  # it works where pickles are read
    digest = hashlib.sha256(poison).hexdigest()
    for step in (2, 4):
        (checkpoint(run, step) / name).write_bytes(poison)
        change_metadata(checkpoint(run, step), lambda metadata: metadata["sha256"].update({name: digest}))
    assert call(RESUME, run) == 2
    assert "holds no tensors" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_with_a_pickled_optimizer_is_refused_with_the_reason(run, capsys):
    def rename(metadata):
        metadata["sha256"]["optimizer.pt"] = metadata["sha256"].pop("optimizer.safetensors")

    for step in (2, 4):
        path = checkpoint(run, step)
        (path / "optimizer.safetensors").rename(path / "optimizer.pt")
        change_metadata(path, rename)
    assert call(RESUME, run) == 2
    assert "pickles are no longer read" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["recipe", "placement"])
def test_code_that_only_the_folder_names_is_not_run(run, tmp_path, capsys, field):
    (run / "theirs.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()")
    config = json.loads((run / "config.json").read_text())
    config[field] = f"{run / 'theirs.py'}:recipe"
    (run / "config.json").write_text(json.dumps(config))
    assert call(EVAL[:2] if field == "recipe" else EVAL, run) == 2
    message = capsys.readouterr().err
    assert "if you trust it, add" in message
    assert not (tmp_path / "ran").exists()


def test_named_by_the_user_it_is_run(run, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from groupwise.core.placement import whole\ndef mine(*values):\n    return whole(*values)\n"
    )
    config = json.loads((run / "config.json").read_text())
    config["placement"] = f"{tmp_path / 'mine.py'}:mine"
    (run / "config.json").write_text(json.dumps(config))
    assert call((*EVAL, "--code", config["placement"]), run) == 0


# Tensors


@pytest.mark.parametrize("name", ["policy.safetensors", "optimizer.safetensors", PARTS[0]])
def test_tensor_files_of_any_content_are_refused_before_anything_is_changed(trained, tmp_path, name):
    path = tmp_path / "step-000004"
    shutil.copytree(checkpoint(trained, 4), path)
    if name in PARTS:
        split_into_parts(path)
    config, original = recipe(), (path / name).read_bytes()
    state = create_state(config.workload.build(torch.device("cpu")).policy, config.optimizer)
    before = {key: tensor.clone() for key, tensor in all_tensors(state).items()}
    for hostile, change in HOSTILE.items():
        (path / name).write_bytes(original)
        rewrite(path / name, change)
        hash_tensor_files(path)
        assert not list(checkpoint_errors(path))  # the hashes fit
        with pytest.raises(UserError, match=r"Restore|Use the recipe"):
            restore(path, state)
        assert all(torch.equal(tensor, before[key]) for key, tensor in all_tensors(state).items()), hostile
    (path / name).write_bytes(original)
    hash_tensor_files(path)
    restore(path, state)
    assert state.step == 4


def test_a_count_of_updates_that_is_none_is_refused(trained, tmp_path):
    path = tmp_path / "step-000004"
    shutil.copytree(checkpoint(trained, 4), path)
    moments = load_file(path / "optimizer.safetensors")
    name = next(key for key in moments if key.endswith(".step"))
    state = create_state(recipe().workload.build(torch.device("cpu")).policy, recipe().optimizer)
    for wrong in (-1.0, float("nan"), 9e30):
        save_file({**moments, name: torch.tensor(wrong)}, path / "optimizer.safetensors")
        hash_tensor_files(path)
        with pytest.raises(UserError, match="no count of the updates"):
            restore(path, state)


def test_a_run_whose_parts_are_links_or_elsewhere_continues_from_the_checkpoint_before(run, tmp_path, capsys):
    split_into_parts(checkpoint(run, 4))
    part = checkpoint(run, 4) / PARTS[1]
    part.rename(tmp_path / "outside")
    part.symlink_to(tmp_path / "outside")
    assert call(RESUME, run) == 0
    message = " ".join(capsys.readouterr().err.split())
    assert f"step-000004 is damaged ({PARTS[1]} is not what was written); trying the one before it" in message
    for name in (f"../step-000002/{PARTS[0]}", str(tmp_path / "outside"), "..", ""):
        change_metadata(checkpoint(run, 2), lambda metadata, name=name: metadata["sha256"].update({name: "0"}))
        assert next(checkpoint_errors(checkpoint(run, 2))).startswith(name)
        change_metadata(checkpoint(run, 2), lambda metadata, name=name: metadata["sha256"].pop(name))


# Files outside


@pytest.mark.parametrize("name", ["picture.png", "config.json", "metrics.jsonl", "samples.jsonl", "eval.json"])
def test_a_report_reads_through_no_link(run, secret, name):
    secret.write_text(json.dumps({"step": 0, "a": SECRET}) + "\n")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    call(REPORT, run)
    page = (run / "report.html").read_text() if (run / "report.html").exists() else ""
    assert SECRET not in page
    assert "c3RlcCI6" not in page  # base64


@pytest.mark.parametrize("name", ["report.html", ".report.html.new", "eval.json", ".eval.json.new", "samples.jsonl"])
@pytest.mark.parametrize("command", [REPORT, EVAL, RESUME], ids=lambda command: command[0])
def test_nothing_is_written_through_a_link(run, secret, command, name):
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    assert call(command, run) in (0, 2)
    assert secret.read_text() == SECRET


def test_a_link_in_place_of_a_checkpoint_is_neither_read_nor_emptied(run, tmp_path, capsys):
    outside = tmp_path / "outside"
    checkpoint(run, 4).rename(outside)
    checkpoint(run, 4).symlink_to(outside)
    (run / "checkpoints" / ".writing-step-000004").symlink_to(outside)
    assert call(RESUME, run) == 0
    assert "after step 2" in capsys.readouterr().err
    assert not list(checkpoint_errors(checkpoint(run, 4)))
    assert {path.name for path in outside.iterdir()} >= {"policy.safetensors", "checkpoint.json"}


def test_checkpoints_elsewhere_are_refused(run, tmp_path, capsys):
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    assert call(RESUME, run) == 2
    assert "is a link" in capsys.readouterr().err


def test_metadata_names_no_file_outside(run):
    def add(metadata):
        metadata["sha256"]["../../config.json"] = hashlib.sha256((run / "config.json").read_bytes()).hexdigest()

    change_metadata(checkpoint(run, 4), add)
    assert next(checkpoint_errors(checkpoint(run, 4))) == "../../config.json is not the name of a file in it"


def test_pipes_and_huge_files_do_not_hold_a_report_up(run):
    os.mkfifo(run / "pipe.png")
    (run / "large.png").touch()
    os.truncate(run / "large.png", 3 << 30)
    assert call(REPORT, run) == 0
    (run / "eval.json").unlink()
    os.mkfifo(run / "eval.json")
    assert call(REPORT, run) == 2


# Strange names and damaged logs


@pytest.mark.parametrize("name", ["step-foo", "step-000020.bak", "step-", "step--3"])
def test_what_is_no_checkpoint_is_ignored_with_a_warning(run, capsys, name):
    (run / "checkpoints" / name).mkdir()
    assert newest_valid_checkpoint(run / "checkpoints", print) == checkpoint(run, 4)
    assert f"{name} is ignored" in capsys.readouterr().out


def test_files_in_place_of_folders(run, capsys):
    (run / "checkpoints" / ".writing-x").write_text("")
    (run / "checkpoints" / "step-000009").write_text("")
    assert call((*RESUME, "--steps", "5"), run) == 0
    assert "step-000009 is damaged (it is not a folder)" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("")
    assert call(RESUME, run) == 2
    assert "is not a folder" in capsys.readouterr().err


TAILS = {
    "zeros": b"\0" * 700,
    "zeros and a line": b"\0" * 700 + b"\n",
    "no text": b"\xff\xfe\x80\n",
    "half a line": b'{"step": 4, "rew\n',
    "a number": b"5\n",
    "a list": b"[1]\n",
    "no step": b'{"reward": 1}\n',
    "another step": b'{"step": "x"}\n',
    "deep": DEEP.encode() + b"\n",
    "many digits": b'{"step": ' + b"9" * 5000 + b"}\n",
}


@pytest.mark.parametrize("tail", TAILS)
def test_a_damaged_log_is_repaired_with_a_warning(run, trained, capsys, tail):
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (run / name).open("ab") as file:
            file.write(TAILS[tail])
    assert call(REPORT, run) == 0
    assert call(RESUME, run) == 0
    message = " ".join(capsys.readouterr().err.split())
    assert "metrics.jsonl: " in message
    assert "samples.jsonl: " in message
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (run / name).read_bytes() == (trained / name).read_bytes()


def test_steps_that_a_log_has_lost_are_told(run, capsys):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([lines[0], "\0\n", lines[3]]))
    assert call(RESUME, run) == 0
    assert "lacks 2 of the 4 steps" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("content", ["[1]", "5", "null", "", "\0", DEEP, '{"before": 5, "settings": 7, "recipe": {}}'])
@pytest.mark.parametrize("name", ["eval.json", "config.json", "plan.json"])
def test_json_of_another_type_is_a_message(run, name, content):
    for command in (REPORT, EVAL, RESUME):
        (run / name).write_text(content)
        assert call(command, run) in (0, 2)


HUGE = "1" + "0" * 400
"""A whole number that JSON has and no float does."""
NUMBERS = {
    "a step far away": ("metrics.jsonl", '{"step": 9007199254740991, "reward": 1}'),
    "a reward": ("metrics.jsonl", '{"step": 3, "reward": ' + HUGE + "}"),
    "memory": ("metrics.jsonl", '{"step": 3, "memory_bytes": {"host": ' + HUGE + ', "device": ' + HUGE + "}}"),
    "a metric next to nothing": ("metrics.jsonl", '{"step": 3, "tiny": 5e-324}'),
    "an evaluation": ("eval.json", '{"before": {"right": ' + HUGE + '}, "step 99999999999999999999": {"right": 1}}'),
    "a plan of nothing": ("plan.json", '{"device_bytes": 1, "settings": {}}'),
    "a plan without memory": (
        "plan.json",
        '{"device_bytes": 0, "settings": {"now": {"parts": {"rollout": {"x": 0}, "update": {"x": 0}}}}}',
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_that_cannot_be_counted_with_are_left_out(run, kind):
    name, content = NUMBERS[kind]
    kept = (run / name).read_text() if name.endswith("l") else ""
    (run / name).write_text(f"{kept}{content}\n")
    (run / ".owner.json").write_text('{"process": 1, "ended": false}')  # as after a kill
    assert call(REPORT, run) == 0
    assert call(RESUME, run) == 0


def test_the_older_samples_have_a_limit_too(run):
    (run / "samples.jsonl").unlink()
    (run / "samples.1.jsonl").touch()
    os.truncate(run / "samples.1.jsonl", 3 << 30)
    assert call(REPORT, run) == 2


# Properties

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["step", "updates", "ranks", "row_limits", "config", "sha256", "versions"])


@settings(max_examples=40)
@given(field=FIELDS, value=JSON)
def test_metadata_of_any_type_is_valid_or_damaged(trained, tmp_path_factory, field, value):
    path = tmp_path_factory.mktemp("any") / "step-000004"
    shutil.copytree(checkpoint(trained, 4), path)
    original = json.loads((path / "checkpoint.json").read_text())[field]
    change_metadata(path, lambda metadata: metadata.update({field: value}))
    errors = list(checkpoint_errors(path))
    shutil.rmtree(path)
    assert all(isinstance(error, str) for error in errors)
    if not errors and field != "versions":
        assert type(value) is type(original)


@settings(max_examples=25)
@given(entries=st.lists(JSON | st.dictionaries(st.sampled_from(["step", "reward", "memory_bytes"]), JSON), max_size=4))
def test_any_log_gives_a_page_or_a_message(trained, tmp_path_factory, entries):
    folder = tmp_path_factory.mktemp("log")
    for name in ("metrics.jsonl", "samples.jsonl", "eval.json"):
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        kept = (trained / name).read_text() if name != "samples.jsonl" else ""
        (folder / name).write_text(lines if name == "eval.json" else kept + lines)
    assert main(["report", str(folder)]) in (0, 2)
    shutil.rmtree(folder)


@settings(max_examples=60)
@given(
    field=st.sampled_from(["steps", "seed", "workload", "optimizer", "run", "loss", "placement", "reward"]), value=JSON
)
def test_settings_of_any_type_are_taken_or_refused(field, value):
    from groupwise.training.config import from_dict, to_dict

    original = recipe()
    try:
        changed = from_dict(original, {**to_dict(original), field: value})
    except UserError:
        return
    assert type(getattr(changed, field)) is type(getattr(original, field))


def test_a_fresh_state_has_no_moments_and_resumes(tmp_path):
    written, resumed = (create_state(torch.nn.Linear(2, 2), OptimizerConfig()) for _ in range(2))
    written.policy.weight.sum().backward()  # the bias gets no gradient, so no moments
    written.optimizer.step()
    restore(write_checkpoint(tmp_path, written, config={}, ranks=1, keep=1), resumed)
    assert len(resumed.optimizer.state) == 1
    (moments,) = resumed.optimizer.state.values()
    for name, value in next(iter(written.optimizer.state.values())).items():
        assert torch.equal(moments[name], value)


# Rotation


def test_samples_rotate_and_resume_finds_them(tmp_path):
    from groupwise.core.io.files import read_jsonl
    from groupwise.training.run_folder.folder import RunFolder

    folder = RunFolder(tmp_path)
    for step in range(10):  # lines of 90 bytes: three exceed 250, so the file rotates after steps 2, 5 and 8
        folder.append("metrics.jsonl", [{"step": step}])
        folder.append_samples([{"step": step, "completion": "x" * 60}], max_bytes=250)
    older, newer = read_jsonl(tmp_path / "samples.1.jsonl"), read_jsonl(tmp_path / "samples.jsonl")
    assert [entry["step"] for entry in older] == [6, 7, 8]
    assert [entry["step"] for entry in newer] == [9]
    folder.rewind(8)
    assert [entry["step"] for entry in folder.samples()] == [6, 7]
    assert not (tmp_path / "samples.1.jsonl").exists()
