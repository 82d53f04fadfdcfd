from __future__ import annotations

import pytest
import torch
import transformers
from tiny.llama import SMALL, llama, ragged_prompts, rows_for
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.workloads.chat.config import PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.generate import generate
from groupwise.workloads.chat.engine.policy import load_policy, make_policy
from groupwise.workloads.chat.engine.score import score

SAMPLING = SamplingParams(max_new_tokens=6, stop_token_ids=(5, 6, 7))
PROMPTS, ROWS = ragged_prompts(2), rows_for(2, 3)
OF = ROWS.condition.tolist()


@pytest.mark.parametrize("settings", [{"lora_rank": 2, "reference": "adapter"}, {"reference": "copy"}], ids=str)
@pytest.mark.parametrize("forward", ["plain", "shared_prefix"])
def test_the_reference_stays_when_the_policy_changes(settings, forward):
    policy = make_policy(llama().double(), PolicyConfig(dtype="float64", forward=forward, **settings))
    completions = generate(policy, PROMPTS, OF, ROWS, SAMPLING)
    before = score(policy, PROMPTS, OF, completions, SAMPLING, reference=True)
    assert_close(before.logp, before.reference_logp, atol=1e-9, rtol=0)
    assert not before.reference_logp.requires_grad
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(0.05)
    after = score(policy, PROMPTS, OF, completions, SAMPLING, reference=True)
    assert_close(after.reference_logp, before.reference_logp, atol=1e-9, rtol=0)
    assert (after.logp - before.logp).abs().max() > 1e-3


def test_a_reference_copy_is_no_part_of_what_is_trained_or_saved():
    policy = make_policy(llama(), PolicyConfig(reference="copy"))
    alone = make_policy(llama(), PolicyConfig())
    assert [name for name, _ in policy.named_parameters()] == [name for name, _ in alone.named_parameters()]


def test_a_model_is_loaded_from_a_folder(tmp_path):
    llama().save_pretrained(tmp_path)
    policy = load_policy(PolicyConfig(str(tmp_path), lora_rank=2, dtype="bfloat16"))
    assert policy.shares_prefix
    frozen = {weight.dtype for weight in policy.parameters() if not weight.requires_grad}
    trained = {weight.dtype for weight in policy.parameters() if weight.requires_grad}
    assert (frozen, trained) == ({torch.bfloat16}, {torch.float32})
    again = load_policy(PolicyConfig(str(tmp_path), lora_rank=2, dtype="bfloat16"))
    for one, other in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_bfloat16_casts_each_weight_once_for_all_tokens_of_a_rollout():
    policy = make_policy(llama(), PolicyConfig(dtype="bfloat16", forward="shared_prefix"))

    def cast_bytes(tokens):
        with torch.profiler.profile(profile_memory=True) as profiled:
            generate(policy, PROMPTS, [0], rows_for(1, 1), SamplingParams(max_new_tokens=tokens))
        return sum(event.cpu_memory_usage for event in profiled.key_averages() if event.key == "aten::_to_copy")

    weights = 2 * sum(weight.numel() for weight in policy.parameters())
    few, many = cast_bytes(4), cast_bytes(12)
    assert few > weights / 2
    assert many - few < weights  # activations; the weights would be eight times as much
    with policy.autocast():  # weights cast without a gradient are not used for training
        completions = generate(policy, PROMPTS, OF, ROWS, SAMPLING)
        score(policy, PROMPTS, OF, completions, SAMPLING).logp.sum().backward()
    assert all(weight.grad is not None for weight in policy.parameters())


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "policy.model is empty"), ("/nowhere", "there is no such folder"), ("{}", "holds no config.json")],
)
def test_models_that_are_not_there_are_refused(tmp_path, name, message):
    with pytest.raises(UserError, match=message):
        load_policy(PolicyConfig(name.format(tmp_path)))


def test_longrope_models_are_limited_to_their_original_length():
    """Beyond it, longrope rotates all tokens of a row differently: sampled and scored log-probs would differ."""
    factors = SMALL["hidden_size"] // SMALL["num_attention_heads"] // 2
    long = llama(
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * factors,
            "long_factor": [4.0] * factors,
            "original_max_position_embeddings": 16,
        },
    )
    assert make_policy(long, PolicyConfig()).max_positions == 16
    assert make_policy(llama(max_position_embeddings=64), PolicyConfig()).max_positions == 64


def test_a_small_model_loads_without_a_progress_bar(tmp_path, capfd):
    llama().save_pretrained(tmp_path)
    transformers.utils.logging.enable_progress_bar()
    load_policy(PolicyConfig(str(tmp_path)))
    assert "Loading weights" not in capfd.readouterr().err
    assert transformers.utils.logging.is_progress_bar_enabled(), "other loaders keep their progress bars"
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "Loading weights" in capfd.readouterr().err
