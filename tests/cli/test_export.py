"""`groupwise export`: whole and sharded checkpoints give the same model; what is damaged or in the way is refused."""

import hashlib
import json
import shutil

import pytest
import tiny.chat
import torch
from safetensors.torch import load_file

from groupwise.cli.main import main
from groupwise.core.io.tensor_files import write_tensors
from groupwise.training.config import OptimizerConfig, to_dict
from groupwise.training.run_folder.checkpoint_writer import write_checkpoint
from groupwise.training.state import create_state
from groupwise.workloads.checkpoint_files import METADATA_FILE, metadata_hash, open_tensors, read_metadata

PARTS = [f"shard-{number:05d}-model-00001-of-00001.safetensors" for number in (1, 2, 3)]


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
    files = open_tensors(checkpoint)
    tensors = {name: files.read(name) for name in files}
    for path in checkpoint.glob("*.safetensors"):
        path.unlink()
    hashes = {}
    for rank, name in enumerate(PARTS):
        pieces = {key: tensor.tensor_split(3)[rank] for key, tensor in tensors.items()}
        pieces = {key: piece for key, piece in pieces.items() if len(piece)}
        before = {key: sum(len(each) for each in tensors[key].tensor_split(3)[:rank]) for key in pieces}
        offsets = {key: [before[key], *[0] * (piece.ndim - 1)] for key, piece in pieces.items()}
        hashes[name] = write_tensors(checkpoint / name, pieces, offsets=offsets)
    rewrite_hashes(checkpoint, hashes)
    return run


def rewrite_hashes(checkpoint, hashes):
    metadata = {**read_metadata(checkpoint), "sha256": dict(hashes)}
    metadata["sha256"][METADATA_FILE] = metadata_hash(metadata)
    (checkpoint / METADATA_FILE).write_text(json.dumps(metadata))


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
    kept = [checkpoint / name for name in (PARTS[0], PARTS[2])]
    rewrite_hashes(checkpoint, {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in kept})
    assert main(["export", str(sharded), str(tmp_path / "model")]) == 2
    assert "do not follow each other" in capsys.readouterr().err


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
