"""Models by name: what is loaded answers as what was saved, and what cannot be loaded is told."""

import json
import shutil
from dataclasses import replace

import huggingface_hub
import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import adapter_for
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.knobs import (
    KnobOptions,
    Knobs,
    default_options,
    guessed_drop_order,
    work_of_answer,
)
from groupwise.workloads.controller.model.load import load_model, weights_fingerprint
from groupwise.workloads.controller.tasks.mosaic.model import ASSET
from groupwise.workloads.controller.tasks.mosaic.task import mosaic_options
from workloads.controller import tiny, tiny_qwen
from workloads.controller.tiny_folders import dense_llava, llava, save_llava, save_qwen


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp(name) for name in ("llava", "qwen")}
    return made, {"llava": save_llava(made["llava"]), "qwen": save_qwen(made["qwen"])}


def test_a_saved_qwen_answers_as_before(folders):
    paths, saved = folders
    loaded = load_model(str(paths["qwen"]))
    assert loaded.identity == weights_fingerprint(saved["qwen"])
    assert not loaded.drop_order_is_measured
    options = loaded.options
    assert (options.total_blocks, options.full_top_k, options.dense_blocks) == (6, 4, (3,))
    assert options.pixels == {"low": 16 * 64, "medium": 32 * 64, "high": 64 * 64}  # 256 positions / 4, 8 x 8 a token
    request = AnswerRequest(tiny_qwen.sample(1), options.cheapest)
    (answer,), _ = Executor(loaded.adapter, options).answer([request], max_new_tokens=3)
    tokens, logits = tiny_qwen.stock_answer(saved["qwen"], options, request, 3)
    assert answer.tokens == tokens
    assert_close(answer.first_logits, logits, rtol=0, atol=1e-4)


def test_a_measured_drop_order_is_taken_from_the_folder(folders, tmp_path):
    paths, saved = folders
    shutil.copytree(paths["llava"], tmp_path / "model")
    (tmp_path / "model" / "importance.json").write_text(json.dumps({"drop_order": [6, 5, 7]}))
    loaded = load_model(tmp_path / "model", dtype=torch.bfloat16)
    assert loaded.drop_order_is_measured
    assert loaded.options == replace(
        default_options(adapter_for(saved["llava"])),
        drop_order=(6, 5, 7),
        most_dropped=2,
        insertion_positions=(1, 2, 3, 4, 5),
    )
    assert loaded.identity != weights_fingerprint(saved["llava"])  # bfloat16 answers are other answers
    (tmp_path / "model" / "importance.json").write_text("{")
    with pytest.raises(UserError, match=r"importance.json is not JSON"):
        load_model(tmp_path / "model")


def test_the_embedded_model_is_the_same_by_name_and_by_folder():
    by_name, by_folder = load_model("mosaic"), load_model(ASSET)
    assert by_name.options == by_folder.options == mosaic_options()
    assert by_name.identity == by_folder.identity


def test_one_changed_weight_is_another_model():
    model = llava()
    before = weights_fingerprint(model)
    assert weights_fingerprint(llava()) == before
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1e-3
    assert weights_fingerprint(model) != before


def test_what_cannot_be_loaded_is_told(folders, tmp_path, monkeypatch):
    paths, _ = folders
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"'nobody/no-such-model' cannot be loaded.*on the hub.*name its folder"):
        load_model("nobody/no-such-model")
    with pytest.raises(UserError, match="There is no folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no config.json"):
        load_model(tmp_path)
    shutil.copytree(paths["llava"], tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UserError, match="cannot be loaded; it was looked for in this folder"):
        load_model(tmp_path / "broken")


def test_a_model_without_eyes_cannot_offer_tiers(tmp_path):
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="LlamaForCausalLM has no vision tower, so it cannot offer the tier knob"):
        load_model(tmp_path)


@torch.no_grad()
def test_a_dense_model_has_every_knob_but_top_k():
    model = dense_llava()
    options = replace(default_options(adapter_for(model)), crops=tiny.CROPS)
    assert (options.full_top_k, list(options.absent)) == (0, ["top_k"])
    executor = Executor(adapter_for(model), options)
    asked = tiny.sample(0)
    asked = replace(asked, crops={tier: crops.expand(-1, 3, -1, -1) for tier, crops in asked.crops.items()})
    knobs = [Knobs("low", 1, 0, 8), Knobs("high", 2, 0, 6)]
    batch = [AnswerRequest(asked, each) for each in knobs]
    prefix = executor.prefix([(asked, "low"), (asked, "high")], torch.ones(32))
    answers, work = executor.answer(batch, max_new_tokens=3)
    continued, _ = executor.answer(batch, prefix=prefix, max_new_tokens=3)
    blocks = model.model.language_model.layers
    for request, answer, again in zip(batch, answers, continued, strict=True):
        kept = [block for block, runs in zip(blocks, options.path(request.knobs), strict=True) if runs]
        model.model.language_model.layers = torch.nn.ModuleList(kept)
        crops = asked.crops[request.knobs.tier]
        ids = torch.tensor([[tiny.IMAGE_TOKEN] * (4 * len(crops)) + list(asked.question)])
        logits = model(input_ids=ids, pixel_values=crops, use_cache=False).logits[0, -1]
        model.model.language_model.layers = blocks
        assert_close(answer.first_logits, logits, rtol=0, atol=1e-4)
        assert again.tokens == answer.tokens
    tokens = 4 * 2 + len(asked.question)
    assert work.expert_pairs == 0 == work_of_answer(options, knobs[0], tokens).expert_pairs
    with pytest.raises(UserError, match="cannot offer the top_k knob, since it is dense: it has no experts"):
        executor.answer([AnswerRequest(asked, Knobs("low", 1, 4, 8))])


def test_too_few_blocks_are_told_and_so_is_a_short_drop_order():
    small = KnobOptions(
        tiny.CROPS, total_blocks=1, full_top_k=4, drop_order=(), insertion_positions=(1,), most_dropped=0
    )
    assert list(small.absent) == ["insertion_position", "top_k", "blocks"]
    with pytest.raises(UserError, match="cannot offer the blocks knob, since it has 1 blocks, too few"):
        small.check(Knobs("low", 1, 4, 2))
    # MolmoE's four least important blocks: from insertion position 5 on only two of them can go.
    with pytest.raises(UserError, match="from insertion position 5 on it names 2 of 16 blocks, and most_dropped is 4"):
        KnobOptions(tiny.CROPS, total_blocks=16, full_top_k=8, drop_order=(4, 13, 10, 2))


def test_the_guessed_order_is_enough_for_every_depth():
    assert guessed_drop_order(16)[:4] == [4, 13, 10, 2]
    for total in (*range(1, 30), 48, 94):
        order = guessed_drop_order(total)
        assert sorted(order) == list(range(1, total - 1))
