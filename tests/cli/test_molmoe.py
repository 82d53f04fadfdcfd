"""A MolmoE folder on the command line: what it costs, how long it takes, which blocks matter, and what is refused."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny.llava import save_llava, tokenizer
from tiny.molmoe import ASSET, copy_folder, published_config, write_shards
from tiny.vqa import write_lines

from groupwise.cli.main import main
from groupwise.workloads.controller.evaluate.importance import measure_importance
from groupwise.workloads.controller.model.load import load_model
from groupwise.workloads.controller.serving.adaptive import make_question

PLAN = ["plan", "controller-molmoe", "--device-memory", "80GiB", "--json"]


def test_the_plan_of_the_real_model_needs_config_json_alone(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(published_config()))
    assert main([*PLAN, "--workload.model", str(tmp_path)]) == 0
    rollout = json.loads(capsys.readouterr().out)["parts"]["rollout"]
    assert rollout["experts"] == 4 * 16 * 64 * 3 * 2048 * 1024
    assert rollout["embeddings and head"] == 4 * (2 * 50304 + 128) * 2048
    parts = ("experts", "attention and routers", "embeddings and head", "vision tower", "connector")
    block = 4 * (1024**2 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024
    # all but the last block of the vision tower, whose output nothing reads
    assert sum(rollout[part] for part in parts) == 4 * (7_221_875_712 - block)
    assert main([*PLAN, "--workload.model", str(tmp_path), "--workload.dtype", "bfloat16"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"]["rollout"]["experts"] == rollout["experts"] // 2


def test_measure_reports_stages_by_tier(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--runs", "1", "--warm-up", "0", "--new-tokens", "2", "--prompt-tokens", "4"]
    assert main(["measure", str(ASSET), *arguments, "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert {row["tier"] for row in measured} == {"low", "medium", "high"}
    assert all(row[stage]["p50_ms"] > 0 for row in measured for stage in ("vision", "prefill", "decode"))
    vision = {row["tier"]: row["vision"]["p50_ms"] for row in measured}
    assert vision["low"] < vision["high"]


def larger_images(folder):
    """Files of a few tiles in place of the tiny ones."""
    for number, file in enumerate(sorted(folder.iterdir())):
        noise = np.random.default_rng(number).integers(0, 256, (200, 260, 3), dtype=np.uint8)
        Image.fromarray(noise).save(file)


@pytest.fixture
def data(tmp_path):
    paths = write_lines(tmp_path / "data", 4)
    larger_images(paths["images"])
    return paths


def test_importance_is_measured_and_read_when_the_model_is_loaded(tmp_path, data, capsys):
    folder = copy_folder(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():  # the third block adds nothing, so it can be dropped without loss
        if ".blocks.2.attn.attn_out." in name or (".blocks.2." in name and ".down_proj." in name):
            weight.zero_()
    save_file(weights, folder / "model.safetensors")
    asked = ["--data", str(data["questions"]), "--images", str(data["images"]), "--questions", "2"]
    assert main(["profile", str(folder), "--importance", *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["drop_order"][0] == 2
    assert sorted(found["drop_order"]) == [1, 2, 3, 4]
    assert found["blocks"][0]["divergence"] == pytest.approx(0, abs=1e-9)
    assert min(block["divergence"] for block in found["blocks"][1:]) > 1e-3
    assert found["questions"] == 2
    loaded = load_model(folder)
    assert loaded.drop_order_is_measured
    assert list(loaded.options.drop_order) == found["drop_order"]


def test_lost_accuracy_decides_before_divergence(tmp_path, data):
    loaded = load_model(ASSET)
    questions = [make_question(file, "What is this?", loaded) for file in sorted(data["images"].iterdir())[:2]]
    answers = iter([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])  # the whole model, blocks 1 to 4

    report = measure_importance(loaded, questions, lambda *_: torch.tensor(next(answers)), max_new_tokens=1)
    lost = {block.block: block.accuracy_lost for block in report.blocks}
    assert (report.accuracy, lost) == (1.0, {1: 1.0, 2: 0.5, 3: 0.0, 4: 0.5})
    assert report.drop_order[0] == 3
    assert report.drop_order[-1] == 1


def dense(folder):
    content = {"model_type": "molmo", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps(content))


def only_pickles(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def header_only(folder):
    (folder / "model.safetensors").write_bytes(b"\x10")


def damaged_header(folder):
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[8:12] = b"nope"
    file.write_bytes(raw)


def changed_weights(change):
    def apply(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return apply


def with_field(name, value):
    def apply(folder):
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, name: value}))

    return apply


def without_shard(folder):
    write_shards(folder, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()


def empty_index(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


def other_tokenizer(folder):
    tokenizer().save_pretrained(folder)


def no_normalization(folder):
    (folder / "preprocessor_config.json").write_text("{}")


LM_HEAD, NORM = "lm_head.weight", "model.transformer.ln_f.weight"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (dense, "is of a dense Molmo"),
        (with_field("block_type", "sequential"), "has block_type 'sequential': only 'moe'"),
        (with_field("rope_impl", "interleave"), "rope_impl is 'interleave'"),
        (with_field("n_kv_heads", 2), "has n_kv_heads 2"),
        (with_field("n_layers", "many"), "n_layers is 'many'"),
        (with_field("n_layers", 6), "lacks 31 of 367 weights, model.transformer.blocks.5"),
        (with_field("n_layers", 4), "holds 31 weights that MolmoE as published does not have"),
        (with_field("vit_layers", [-20]), "has vit_layers [-20]"),
        (with_field("vision_backbone", None), "has no vision_backbone"),
        (only_pickles, "has its weights in .bin files, which are pickles"),
        (no_weights, "holds no weights: neither model.safetensors"),
        (truncated, "is cut off"),
        (header_only, "is cut off or no safetensors file"),
        (damaged_header, "has a damaged header"),
        (without_shard, "lacks 1 of its 3 files of weights, model-00002-of-00003.safetensors"),
        (empty_index, "has no weight_map"),
        (changed_weights(lambda weights: weights.pop(NORM)), "lacks 1 of 336 weights, model.transformer.ln_f.weight"),
        (changed_weights(lambda weights: weights.update({LM_HEAD: torch.zeros(319, 64)})), "has shape [319, 64]"),
        (changed_weights(lambda weights: weights.update({LM_HEAD: weights[LM_HEAD].long()})), "as I64"),
        (other_tokenizer, "is the tokenizer of another model: '<im_start>' is None there"),
        (no_normalization, "has no image_mean and image_std"),
    ],
)
def test_a_bad_folder_is_one_paragraph_and_exit_code_2(tmp_path, capsys, monkeypatch, damage, says):
    monkeypatch.chdir(tmp_path)
    folder = copy_folder(tmp_path / "model")
    damage(folder)
    assert main(["measure", str(folder), "--runs", "1", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert says in error
    assert "\n" not in error
    assert len(error) < 500


@pytest.mark.parametrize(
    ("damage", "says"), [(dense, "is of a dense Molmo"), (with_field("clip_qkv", 8.0), "clip_qkv")]
)
def test_the_plan_refuses_what_cannot_be_loaded(tmp_path, capsys, damage, says):
    folder = copy_folder(tmp_path / "model")
    damage(folder)
    assert main([*PLAN, "--workload.model", str(folder)]) == 2
    assert says in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([str(ASSET), "--importance"], "--data is not given"),
        (["mosaic", "--importance", "--data", "rows.jsonl", "--images", "."], "is not a folder to write"),
        ([str(ASSET), "--importance", "--data", "a", "--images", ".", "--output", "no/where"], "cannot be written"),
    ],
)
def test_importance_needs_data_and_a_place(capsys, arguments, says):
    assert main(["profile", *arguments, "--json"]) == 2
    assert says in json.loads(capsys.readouterr().out)["error"]


def test_the_crop_rule_is_refused_for_other_models(tmp_path, capsys):
    save_llava(tmp_path / "llava")
    paths = write_lines(tmp_path / "data", 4)
    arguments = ["--workload.model", str(tmp_path / "llava"), "--workload.estimator", "proportional"]
    arguments += ["--workload.questions", str(paths["questions"]), "--workload.images", str(paths["images"])]
    assert main(["check", "controller-molmoe", *arguments, "--workload.published-crop-rule", "--json"]) == 2
    assert "is a rule of MolmoE alone" in json.loads(capsys.readouterr().out)["error"]
