"""`groupwise export`: whole and sharded checkpoints give the same model; what is damaged or in the way is refused."""

import json
import shutil

import pytest
import tiny.chat
import torch
from safetensors.torch import load_file, save_file
from strangers import HOSTILE, PARTS, hash_tensor_files, rewrite, split_into_parts, with_tensor

from groupwise.cli.main import main
from groupwise.training.config import OptimizerConfig, to_dict
from groupwise.training.run_folder.checkpoint_writer import write_checkpoint
from groupwise.training.state import create_state
from groupwise.workloads.checkpoint_files import METADATA_FILE


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run whose averaged weights are the trained ones and 1."""
    run = tmp_path_factory.mktemp("export") / "run"
    config = tiny.chat.recipe(run.parent / "chat")
    state = create_state(config.workload.build(torch.device("cpu")).policy, OptimizerConfig(ema_decay=0.5))
    state.step = 3
    for name, weight in state.policy.named_parameters():
        weight.data += torch.randn(weight.shape)
        state.ema.weights[name].copy_(weight + 1)
    write_checkpoint(run / "checkpoints", state, config=to_dict(config), ranks=1, keep=1)
    (run / "config.json").write_text(json.dumps(to_dict(config)))
    return run


@pytest.fixture
def sharded(whole, tmp_path):
    """The same checkpoint as three ranks would write it."""
    run = tmp_path / "sharded"
    shutil.copytree(whole, run)
    (checkpoint,) = (run / "checkpoints").iterdir()
    split_into_parts(checkpoint)
    return run


def exported(run, folder, *flags):
    assert main(["export", str(run), str(folder), *flags]) == 0
    return load_file(folder / "model.safetensors")


def test_parts_of_three_ranks_give_the_model_of_the_whole_files(whole, sharded, tmp_path):
    expected = exported(whole, tmp_path / "whole")
    parts = exported(sharded, tmp_path / "parts")
    assert expected.keys() == parts.keys()
    assert all(torch.equal(parts[name], weight) for name, weight in expected.items())


def test_averaged_or_trained_weights_by_flag(whole, tmp_path):
    averaged, trained = (exported(whole, tmp_path / kind, "--weights", kind) for kind in ("averaged", "trained"))
    auto = exported(whole, tmp_path / "auto")
    for name, weight in trained.items():
        torch.testing.assert_close(averaged[name], weight + 1)
        assert torch.equal(auto[name], averaged[name])


def test_a_damaged_checkpoint_is_reported_once_and_the_one_before_it_is_exported(sharded, tmp_path, capsys, recwarn):
    newest = shutil.copytree(sharded / "checkpoints" / "step-000003", sharded / "checkpoints" / "step-000004")
    next(newest.glob("shard-00002-*")).unlink()
    exported(sharded, tmp_path / "out")
    output = capsys.readouterr()
    assert "of step-000003" in output.out
    assert output.err.count("is damaged") == 1
    assert not [warning for warning in recwarn if "is damaged" in str(warning.message)]


def truncated(path):
    path.write_bytes(path.read_bytes()[:-10])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def longer(path):
    path.write_bytes(path.read_bytes() + b"0")


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), truncated, flipped, longer])
@pytest.mark.parametrize("name", [*PARTS[:2], METADATA_FILE])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_written(sharded, tmp_path, capsys, name, damage):
    (checkpoint,) = (sharded / "checkpoints").iterdir()
    damage(checkpoint / name)
    assert main(["export", str(sharded), str(tmp_path / "model")]) == 2
    stderr = capsys.readouterr().err
    assert "Every checkpoint in" in stderr
    assert f"step-000003 is damaged ({checkpoint / name}" in stderr or f"({name} is" in stderr or "(in " in stderr
    assert not (tmp_path / "model").exists()


def test_a_part_that_lacks_rows_is_refused_although_its_hash_fits(sharded, tmp_path, capsys):
    (checkpoint,) = (sharded / "checkpoints").iterdir()
    (checkpoint / PARTS[1]).unlink()
    hash_tensor_files(checkpoint)
    assert main(["export", str(sharded), str(tmp_path / "model")]) == 2
    assert "do not follow each other" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ema.safetensors", PARTS[0]])
def test_tensor_files_of_any_content_are_refused(whole, sharded, tmp_path, capsys, name):
    run = tmp_path / "run"
    shutil.copytree(sharded if name in PARTS else whole, run)
    (checkpoint,) = (run / "checkpoints").iterdir()
    original = (checkpoint / name).read_bytes()
    for hostile, change in HOSTILE.items():
        (checkpoint / name).write_bytes(original)
        rewrite(checkpoint / name, change)
        hash_tensor_files(checkpoint)
        assert main(["export", str(run), str(tmp_path / "model")]) == 2, hostile
        assert "Restore" in (message := capsys.readouterr().err) or "does not belong to this model" in message, hostile
        assert not (tmp_path / "model").exists()


def test_names_of_a_stranger_do_not_reach_the_terminal_as_they_are(whole, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (checkpoint,) = (run / "checkpoints").iterdir()
    (run / "checkpoints" / "step-\x1b[2J").mkdir()
    rewrite(checkpoint / "ema.safetensors", with_tensor(name="ema/\x1b]0;owned\x07"))
    hash_tensor_files(checkpoint)
    assert main(["export", str(run), str(tmp_path / "model")]) == 2
    message = capsys.readouterr().err
    assert "step-\\x1b[2J is ignored" in message
    assert "\\x1b]0;owned\\x07' is none of its weights" in message
    assert "\x1b" not in message


def test_a_checkpoint_that_lacks_a_trained_weight_is_refused(whole, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (checkpoint,) = (run / "checkpoints").iterdir()
    weights = load_file(checkpoint / "policy.safetensors")
    missing = next(iter(weights))
    del weights[missing]
    save_file(weights, checkpoint / "policy.safetensors")
    hash_tensor_files(checkpoint)
    assert main(["export", str(run), str(tmp_path / "model"), "--weights", "trained"]) == 2
    assert f"lacks 'policy/{missing}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "policy",
    [
        {"model": 7},
        {"lora_rank": 10**12},
        {"lora_rank": -1},
        {"lora_targets": [1, None]},
        {"dtype": "os"},
        {"lora_rank": 4, "lora_targets": ["("]},
        {"lora_rank": 4, "lora_targets": ["none_such"]},
        {"gradient_checkpointing": "x"},
        {"forward": {}},
        {"lora_alpha": 1e999},
        {"model": "../../../etc"},
        {"model": "http://127.0.0.1:9/x"},
    ],
    ids=str,
)
def test_settings_of_any_kind_are_refused(whole, tmp_path, capsys, policy):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    config = json.loads((run / "config.json").read_text())
    config["workload"]["policy"] |= policy
    (run / "config.json").write_text(json.dumps(config))
    assert main(["export", str(run), str(tmp_path / "model")]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_what_is_in_the_way_or_missing_is_refused(whole, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert main(["export", str(whole), str(tmp_path / "full")]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    assert main(["export", str(tmp_path / "nowhere"), str(tmp_path / "model")]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err
    assert main(["export", str(whole), str(tmp_path / "model"), "--adapter"]) == 2
    assert "it has no adapter" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_place_that_cannot_be_written_is_a_sentence(whole, tmp_path, capsys):
    for folder in ("/proc/nowhere", str(tmp_path / "\udcff"), str(tmp_path / "file" / "folder")):
        (tmp_path / "file").touch()
        assert main(["export", str(whole), folder]) == 2
        assert "groupwise: " in capsys.readouterr().err
