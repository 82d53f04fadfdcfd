"""A model whose answers the executor would get wrong is refused when it is loaded; a right one is checked once."""

import pytest
import torch
from tiny.families import llava
from tiny.llava import color_llava, save_llava, tokenizer
from torch import tensor
from torch.testing import assert_close

from groupwise.cli.main import main
from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import LlavaAdapter, adapter_for, default_options
from groupwise.workloads.controller.model.adapters.experts import RouterRule, expert_module, router_of, router_rule
from groupwise.workloads.controller.model.images import ImageNormalization
from groupwise.workloads.controller.model.load import LoadedModel, load_model
from groupwise.workloads.controller.model.self_check import compare

NORMALIZATION = ImageNormalization((0.5,) * 3, (0.5,) * 3)


def loaded(model, **parts):
    adapter = adapter_for(model)
    return LoadedModel("tiny", model, adapter, default_options(adapter), drop_order_is_measured=False, **parts)


def text_of(model):
    return model.model.language_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("template", [True, False])
def test_a_right_model_passes_with_the_inputs_of_its_front_end(dtype, template):
    words = tokenizer() if template else tokenizer(template=None)
    errors = compare(loaded(color_llava().to(dtype), tokenizer=words, normalization=NORMALIZATION))
    assert max(errors.values()) < (1e-5 if dtype == torch.float32 else 0.1)


class TextOfLlava(LlavaAdapter):
    """As if transformers had no whole model, only its text model."""

    def _stock_inputs(self, *_):
        return None


def test_where_transformers_has_only_the_text_model_that_is_compared():
    model = color_llava()
    adapter = TextOfLlava(model)
    checked = LoadedModel("tiny", model, adapter, default_options(adapter), drop_order_is_measured=False)
    assert max(compare(checked).values()) < 1e-5
    text_of(model).layers[2].register_forward_hook(
        lambda _module, _given, states: states - states.mean(1, keepdim=True)
    )
    with pytest.raises(UserError, match="the executor's logits differ"):
        compare(checked)


def test_what_a_text_model_computes_outside_its_blocks_is_noticed():
    model = color_llava()

    def scale(_, positional, named):
        return positional, {**named, "inputs_embeds": 1.5 * named["inputs_embeds"]}

    text_of(model).register_forward_pre_hook(scale, with_kwargs=True)
    with pytest.raises(
        UserError, match=r"'tiny' \(LlavaForConditionalGeneration with the text model 'olmoe'\).*differ"
    ):
        compare(loaded(model))


def test_a_block_that_mixes_tokens_of_several_rows_is_noticed():
    model = color_llava()
    text_of(model).layers[2].register_forward_hook(
        lambda _module, _given, states: states - states.mean(1, keepdim=True)
    )
    with pytest.raises(UserError, match="the executor's logits differ from those of transformers by"):
        compare(loaded(model))


def test_knobs_that_are_not_the_models_own_are_noticed():
    """With all experts nothing differs: only fewer of them show a wrong rule."""
    model = color_llava()
    checked = loaded(model)
    for block in text_of(model).layers:
        block.mlp.experts.groupwise_rule = RouterRule(renormalizes=True)  # this router does not
    with pytest.raises(UserError, match="with the fewest blocks and experts the executor's logits differ"):
        compare(checked)


def test_a_comparison_leaves_the_model_as_it_was():
    model = color_llava()
    compare(loaded(model))
    assert {block.mlp.gate.top_k for block in text_of(model).layers} == {4}
    assert not any(block._forward_hooks for block in text_of(model).layers)


def test_a_folder_is_checked_once(tmp_path, monkeypatch):
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))
    save_llava(tmp_path / "model")
    load_model(tmp_path / "model")
    (record,) = (tmp_path / "cache" / "self-checks").iterdir()
    first = record.stat().st_mtime_ns
    load_model(tmp_path / "model")
    assert [file.stat().st_mtime_ns for file in record.parent.iterdir()] == [first]
    load_model(tmp_path / "model", dtype=torch.bfloat16)  # rounds differently: another check
    assert len(list(record.parent.iterdir())) == 2


def test_a_refused_folder_exits_with_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))
    llava("gemma2").save_pretrained(tmp_path / "model")
    assert main(["profile", str(tmp_path / "model"), "--seconds", "1"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "with the text model 'gemma2') cannot be controlled: This model's attention uses softcap" in told
    assert not (tmp_path / "cache").exists()


def test_tiers_beyond_the_context_do_not_hinder_the_check():
    model = color_llava()
    model.config.text_config.max_position_embeddings = 40  # 4 crops of 4 tokens fit, 13 do not
    compare(loaded(model, tokenizer=tokenizer(), normalization=NORMALIZATION))


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(UserError, match="is one of another model: it has no token 63, which stands for the image"):
        compare(loaded(llava(), tokenizer=tokenizer(), normalization=NORMALIZATION))
    small = color_llava()
    small.config.text_config.vocab_size = 4  # of 40 words
    with pytest.raises(UserError, match="it gives the token 39, and the model knows 4 tokens"):
        compare(loaded(small, tokenizer=tokenizer(), normalization=NORMALIZATION))


def test_fewer_experts_by_hand():
    weights, kept = tensor([[0.5, 0.3, 0.2]]), tensor([[True, True, False]])
    assert_close(RouterRule().reduce(weights, kept), weights)  # the third is not computed
    # 0.5 and 0.3 of 0.8 become 0.625 and 0.375 of 1; with a scaling factor of 2.5, of 2.5
    renormalized = RouterRule(renormalizes=True)
    assert_close(renormalized.reduce(weights, kept), tensor([[0.625, 0.375, 0.0]]))
    assert_close(renormalized.reduce(2.5 * weights, kept), 2.5 * tensor([[0.625, 0.375, 0.0]]))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("olmoe", RouterRule()),
        ("mixtral", RouterRule(renormalizes=True)),
        ("granitemoe", RouterRule(renormalizes=True)),
        ("deepseek_v3", None),  # chooses by scores with a correction, and returns the choices in no order
    ],
)
def test_the_rule_of_a_router_is_found_by_asking_it(text, rule):
    assert router_rule(router_of(expert_module(text_of(llava(text)).layers[-1]))) == rule


def test_without_a_correction_choices_in_no_order_are_ranked_by_weight():
    gate = text_of(llava("deepseek_v3")).layers[-1].mlp.gate
    gate.e_score_correction_bias.zero_()
    assert router_rule(gate) in (RouterRule(renormalizes=True), RouterRule(sorts=True, renormalizes=True))
