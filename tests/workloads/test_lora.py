"""LoRA in place: PEFT's own initial weights, nothing changed by a fresh adapter, and a plain model after merging."""

import copy

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.workloads.lora import add_lora, merge_lora, without_lora

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 24, "vocab_size": 32, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
KINDS = {"llama": {}, "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2}}
IDS = torch.arange(12).view(2, 6)
LORA = {"rank": 4, "alpha": 8.0, "seed": 3, "setting": "policy.lora_targets"}


def model_of(kind, dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def adapters_of(model):
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_is_the_one_that_peft_makes(kind, dtype):
    model, theirs = model_of(kind, dtype), model_of(kind, dtype)
    before = torch.get_rng_state()
    add_lora(model, targets=(), **LORA)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(LORA["seed"])
    config = LoraConfig(r=4, lora_alpha=8.0, target_modules="all-linear", lora_dropout=0.0)
    expected = {
        name.removeprefix("base_model.model."): w for name, w in adapters_of(get_peft_model(theirs, config)).items()
    }
    ours = adapters_of(model)
    assert list(ours) == list(expected)
    for name, weight in ours.items():
        assert weight.dtype == expected[name].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(weight, expected[name])


@pytest.mark.parametrize("kind", KINDS)
def test_switched_off_it_is_the_base_model_and_merged_a_plain_one(kind, tmp_path):
    model = model_of(kind)
    base, names = copy.deepcopy(model), list(model.state_dict())
    add_lora(model, targets=(), **LORA)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, base(IDS).logits)
        for weight in adapters_of(model).values():
            weight.normal_(std=0.2)
        trained = model(IDS).logits
        assert (trained - base(IDS).logits).abs().max() > 0.01
        with without_lora(model):
            assert torch.equal(model(IDS).logits, base(IDS).logits)
        assert torch.equal(model(IDS).logits, trained)
        assert len(adapters_of(model)) > 0
        merge_lora(model)
        assert list(model.state_dict()) == names
        assert_close(model(IDS).logits, trained, rtol=0, atol=1e-5)
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert_close(loaded(IDS).logits, trained, rtol=0, atol=1e-5)


def test_only_the_named_layers_get_an_adapter():
    model = model_of("llama")
    add_lora(model, targets=("q_proj", "self_attn.v_proj", "to_q"), **LORA)
    assert {name.split(".")[4] for name in adapters_of(model)} == {"q_proj", "v_proj"}
    with pytest.raises(
        UserError, match=r"policy.lora_targets is \('to_q',\): no layer of LlamaForCausalLM .*PEFT says"
    ):
        add_lora(model_of("llama"), targets=("to_q",), **LORA)
