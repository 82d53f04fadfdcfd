"""Parameters of models and adapters, and the size of the KV cache: exact, from a config.json alone."""

import json

import pytest
import torch
import transformers

from groupwise.core.errors import UserError
from groupwise.memory.architecture import architecture, read_architecture

SMALL = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 80, "vocab_size": 96}
CASES = {
    "llama": {},
    "mistral": {"head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
}


def config_of(model_type):
    known = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return transformers.AutoConfig.for_model(model_type, **SMALL, **CASES[model_type], **known)


@pytest.mark.parametrize("model_type", CASES)
def test_every_parameter_is_counted(model_type, tmp_path):
    config = config_of(model_type)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert read_architecture(tmp_path).parameters == model.num_parameters()


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "olmoe", "mixtral"])
def test_every_parameter_of_an_adapter_is_counted(model_type):
    from groupwise.workloads.chat.config import PolicyConfig
    from groupwise.workloads.chat.engine.policy import make_policy

    model = transformers.AutoModelForCausalLM.from_config(config_of(model_type))
    policy = make_policy(model, PolicyConfig(model="-", lora_rank=8, forward="plain"))
    trained = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    assert architecture(config_of(model_type).to_dict()).lora_params(8) == trained


def test_the_cache_of_the_notes_example_is_256_mib():
    # 16 layers x 2 x 8 rows x 8 heads x 512 tokens x 128 wide x 2 bytes
    model = architecture(
        {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 8}
        | {"head_dim": 128, "intermediate_size": 1, "vocab_size": 65536}
    )
    assert model.kv_bytes(8 * 512, 2) == 256 << 20


def test_grouped_heads_keep_a_quarter_of_the_cache():
    base = {"model_type": "llama", "intermediate_size": 1, **SMALL}
    whole, grouped = (architecture(base | {"num_key_value_heads": heads}) for heads in (4, 1))
    assert whole.kv_bytes(100, 4) == 4 * grouped.kv_bytes(100, 4)


def test_the_cache_is_what_a_model_really_keeps():
    model = transformers.AutoModelForCausalLM.from_config(config_of("llama"))
    with torch.no_grad():
        cache = model(torch.arange(10)[None], use_cache=True).past_key_values
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert architecture(config_of("llama").to_dict()).kv_bytes(10, 4) == kept


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"model_type": "mamba"}, "has model_type 'mamba': the plan knows llama"),
        ({"model_type": "llama", "hidden_size": 8}, "lacks num_hidden_layers"),
        ({}, "has model_type 'None'"),
    ],
)
def test_unknown_architectures_are_refused(content, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=says):
        read_architecture(tmp_path)


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read as a model's"):
        read_architecture(tmp_path / "nothing.json")
