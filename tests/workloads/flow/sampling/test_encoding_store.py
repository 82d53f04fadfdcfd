"""Encodings on the disk: shared, limited in size, and computed again when a file is damaged."""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny.sd3 import tiny_sd3
from tiny.wan import tiny_recam

from groupwise.workloads.flow.models.pipeline_folder import encoder_hash
from groupwise.workloads.flow.sampling.encoding_store import CachedEncoder, EncodingStore
from workloads.flow.small import CPU


class Lengths:
    """Encodes a text as its length, and counts."""

    def __init__(self, store, identity="encoder"):
        self.rows = 0
        self.cached = CachedEncoder(store, lambda: identity)

    def __call__(self, *texts):
        def encode(row):
            self.rows += 1
            return {"length": torch.tensor(float(len(texts[row]))), "mask": torch.ones(3).bool()}

        return [int(encoding["length"]) for encoding in self.cached.encode(texts, encode)]


def test_equal_contents_are_encoded_once_and_shared_by_all_that_use_the_folder(tmp_path):
    first, second = (Lengths(EncodingStore(tmp_path, 1 << 20)) for _ in range(2))
    assert first("aa", "b", "aa") == [2, 1, 2]
    assert second("b", "ccc", "aa") == [1, 3, 2]
    assert (first.rows, second.rows) == (2, 1)
    other = Lengths(EncodingStore(tmp_path, 1 << 20), "another encoder")
    assert other("b") == [1]
    assert other.rows == 1


def test_without_a_store_nothing_is_written(tmp_path):
    encoder = Lengths(None)
    assert encoder("aa", "aa") == encoder("aa", "bb") == [2, 2]
    assert encoder.rows == 3


@pytest.mark.parametrize("damage", ["cut", "flipped", "other", "empty"])
def test_a_damaged_file_is_encoded_again_loudly(tmp_path, damage):
    store = EncodingStore(tmp_path, 1 << 20)
    Lengths(store)("aa")
    (file,) = tmp_path.glob("*.safetensors")
    content = file.read_bytes()
    if damage == "other":
        save_file({"length": torch.tensor(5.0)}, file)
    else:
        flipped = content[:-1] + bytes([content[-1] ^ 1])
        file.write_bytes({"cut": content[:-9], "flipped": flipped, "empty": b""}[damage])
    encoder = Lengths(store)
    with pytest.warns(UserWarning, match=r"\.safetensors is damaged: it is deleted and encoded again"):
        assert encoder("aa") == [2]
    assert encoder.rows == 1
    assert load_file(file)["length"] == 2


def test_what_was_not_used_for_longest_is_deleted(tmp_path):
    store = EncodingStore(tmp_path, 10_000)
    for index in range(4):
        store.write(f"{index}", {"column": torch.zeros(600)})  # about 2.6 kB each
        os.utime(tmp_path / f"{index}.safetensors", (index, index))
    assert len(list(tmp_path.iterdir())) == 3
    store.read("1")  # used: now the newest
    store.write("4", {"column": torch.zeros(600)})
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["1", "3", "4"]
    store.write("5", {"column": torch.zeros(6000)})
    assert store.read("5") is None  # larger than all that is allowed


def test_several_writers_and_readers_agree(tmp_path):
    """For a second and a half, in a folder that has room for two of three files: what is read may just be deleted."""
    end = time.monotonic() + 1.5

    def work(number):
        store, drawn, reads, writes = EncodingStore(tmp_path, 600), random.Random(number), 0, 0
        while time.monotonic() < end:
            length, encoder = drawn.randint(1, 3), Lengths(store)
            assert encoder("x" * length) == [length]
            reads, writes = reads + 1, writes + encoder.rows
        return reads, writes

    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(work, range(4)))
    assert all(reads > writes > 0 for reads, writes in counts)
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize("kind", ["wan", "sd3"])
def test_a_second_run_encodes_nothing(request, data, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path))
    folder = request.getfixturevalue(kind)
    config = tiny_recam(folder, data) if kind == "wan" else tiny_sd3(folder)
    rows = torch.tensor([0, 1])
    encoded = [config.build(CPU) for _ in range(2)]
    first = encoded[0].conditioning.of(rows, CPU)
    pipeline = encoded[1].model.pipeline
    pipeline.text_encoder.forward = pipeline.vae.encode = None  # whatever needs them fails
    second = encoded[1].conditioning.of(rows, CPU)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_other_weights_and_settings_are_another_encoder(tmp_path):
    (tmp_path / "vae").mkdir()
    weights = tmp_path / "vae" / "weights"
    weights.write_bytes(b"one")
    hashes = {encoder_hash(tmp_path, ["vae"], 16), encoder_hash(tmp_path, ["vae"], 32)}
    weights.write_bytes(b"two")
    hashes.add(encoder_hash(tmp_path, ["vae"], 16))
    assert len(hashes) == 3
