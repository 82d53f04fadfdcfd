"""Models by name: what is loaded answers as what was saved, and what cannot be loaded is refused with the reason."""

import json
import shutil
from dataclasses import replace

import huggingface_hub
import pytest
import torch
from tiny import qwen_vl
from tiny.llava import CROPS, IMAGE_TOKEN, color_llava, dense_llava, sample, save_llava
from tiny.qwen_vl import save_qwen
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import adapter_for, default_options
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor, PrefixItem
from groupwise.workloads.controller.model.knobs import Knobs, work_of_answer
from groupwise.workloads.controller.model.load import load_model
from groupwise.workloads.controller.tasks import EMBEDDED_MODELS
from groupwise.workloads.controller.tasks.mosaic.model import ASSET, mosaic_options
from groupwise.workloads.hub import weights_fingerprint


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp(name) for name in ("llava", "qwen")}
    return made, {"llava": save_llava(made["llava"]), "qwen": save_qwen(made["qwen"])}


def test_a_saved_qwen_answers_as_before(folders):
    paths, saved = folders
    loaded = load_model(str(paths["qwen"]))
    assert loaded.fingerprint == weights_fingerprint(saved["qwen"])
    assert not loaded.drop_order_is_measured
    options = loaded.options
    assert (options.total_blocks, options.full_top_k, options.dense_blocks) == (6, 4, (3,))
    assert options.pixels == {"low": 16 * 64, "medium": 32 * 64, "high": 64 * 64}  # 256 positions / 4, 8 x 8 a token
    request = AnswerRequest(qwen_vl.sample(1), options.cheapest)
    (answer,), _ = Executor(loaded.adapter, options).answer([request], max_new_tokens=3)
    tokens, logits = qwen_vl.stock_answer(saved["qwen"], options, request, 3)
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
        max_dropped_blocks=2,
        insertion_positions=(1, 2, 3, 4, 5),
    )
    assert loaded.fingerprint != weights_fingerprint(saved["llava"])  # bfloat16 answers are other answers
    (tmp_path / "model" / "importance.json").write_text("{")
    with pytest.raises(UserError, match=r"importance.json is damaged"):
        load_model(tmp_path / "model")


def test_the_embedded_model_is_the_same_by_name_and_by_folder():
    by_name, by_folder = load_model("mosaic"), load_model(ASSET)
    assert by_name.options == mosaic_options()
    # a folder offers to drop a quarter of the blocks, where the task offers a third
    assert replace(by_folder.options, max_dropped_blocks=4) == mosaic_options()
    assert by_folder.options.max_dropped_blocks == 3
    assert by_name.fingerprint == by_folder.fingerprint


def test_one_changed_weight_is_another_model():
    model = color_llava()
    before = weights_fingerprint(model)
    assert weights_fingerprint(color_llava()) == before
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1e-3
    assert weights_fingerprint(model) != before


def test_what_cannot_be_loaded_is_refused_with_the_reason(folders, tmp_path, monkeypatch):
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


def test_a_model_without_a_vision_tower_cannot_offer_tiers(tmp_path):
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="LlamaForCausalLM has no vision tower, so it cannot offer the tier knob"):
        load_model(tmp_path)


@torch.no_grad()
def test_a_dense_model_has_every_knob_but_top_k():
    model = dense_llava()
    options = replace(default_options(adapter_for(model)), crops_by_tier=CROPS)
    assert (options.full_top_k, list(options.unavailable)) == (0, ["top_k"])
    executor = Executor(adapter_for(model), options)
    asked = sample(0)
    asked = replace(
        asked, crops_by_tier={tier: crops.expand(-1, 3, -1, -1) for tier, crops in asked.crops_by_tier.items()}
    )
    knobs = [Knobs("low", 1, 0, 8), Knobs("high", 2, 0, 6)]
    batch = [AnswerRequest(asked, each) for each in knobs]
    prefix = executor.run_prefix([PrefixItem([asked], tier) for tier in ("low", "high")], torch.ones(32))
    answers, work = executor.answer(batch, max_new_tokens=3)
    continued, _ = executor.answer(batch, prefix=prefix, max_new_tokens=3)
    blocks = model.model.language_model.layers
    for request, answer, again in zip(batch, answers, continued, strict=True):
        kept = [block for block, runs in zip(blocks, options.block_path(request.knobs), strict=True) if runs]
        model.model.language_model.layers = torch.nn.ModuleList(kept)
        crops = asked.crops_by_tier[request.knobs.tier]
        ids = torch.tensor([[IMAGE_TOKEN] * (4 * len(crops)) + list(asked.question_ids)])
        logits = model(input_ids=ids, pixel_values=crops, use_cache=False).logits[0, -1]
        model.model.language_model.layers = blocks
        assert_close(answer.first_logits, logits, rtol=0, atol=1e-4)
        assert again.tokens == answer.tokens
    tokens = 4 * 2 + len(asked.question_ids)
    assert work.expert_pairs == 0 == work_of_answer(options, knobs[0], tokens).expert_pairs
    with pytest.raises(UserError, match="cannot offer the top_k knob, since it is dense: it has no experts"):
        executor.answer([AnswerRequest(asked, Knobs("low", 1, 4, 8))])


def test_a_name_is_never_code_to_import(tmp_path, monkeypatch):
    """Only keys of the table are: a checkpoint's config.json holds a name, and may come from a stranger."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "strange.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    for name in ("strange:load", "strange", EMBEDDED_MODELS["mosaic"]):
        with pytest.raises(UserError, match="cannot be loaded"):
            load_model(name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("family", ["llava", "qwen"])
def test_probe_samples_are_the_same_every_time_and_of_the_given_lengths(folders, family):
    loaded = load_model(folders[0][family])
    samples, again = (loaded.front_end.probe_samples([3, 8]) for _ in range(2))
    assert [len(each.question_ids) for each in samples] == [3, 8]
    assert len({each.name for each in samples}) == 2
    for one, other in zip(samples, again, strict=True):
        assert one.question_ids == other.question_ids
        assert_close(dict(one.crops_by_tier), dict(other.crops_by_tier), rtol=0, atol=0)
    Executor(loaded.adapter, loaded.options).answer([AnswerRequest(samples[0], loaded.options.full)])


def test_the_embedded_model_brings_its_own_front_end():
    loaded = load_model("mosaic")
    samples = loaded.front_end.probe_samples([32])
    assert len({each.name for each in samples}) == len(samples) == 24
    assert {len(each.question_ids) for each in samples} == {2, 3}
    ids = loaded.front_end.sample(torch.zeros(36, 48), "digit b3").question_ids
    assert loaded.front_end.decode(ids) == "digit b3"
