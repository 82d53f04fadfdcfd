from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.workloads.chat.config import PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.generate import generate
from groupwise.workloads.chat.engine.policy import load_policy, make_policy
from groupwise.workloads.chat.engine.score import score, split_into_passes
from workloads.chat.models import SMALL, _made, llama, ragged_prompts, rows_for

SAMPLING = SamplingParams(max_new_tokens=6, stop_ids=(5, 6, 7))
PROMPTS, ROWS = ragged_prompts(2), rows_for(2, 3)
OF = ROWS.condition.tolist()


@pytest.mark.parametrize("settings", [{"lora_rank": 2, "reference": "adapter"}, {"reference": "copy"}], ids=str)
@pytest.mark.parametrize("path", ["plain", "shared"])
def test_the_reference_stays_when_the_policy_moves(settings, path):
    policy = make_policy(llama().double(), PolicyConfig(dtype="float64", path=path, **settings))
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
    assert policy.shares_prompts
    frozen = {weight.dtype for weight in policy.parameters() if not weight.requires_grad}
    trained = {weight.dtype for weight in policy.parameters() if weight.requires_grad}
    assert (frozen, trained) == ({torch.bfloat16}, {torch.float32})
    again = load_policy(PolicyConfig(str(tmp_path), lora_rank=2, dtype="bfloat16"))
    for one, other in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_bfloat16_rounds_each_weight_once_for_all_tokens_of_a_rollout():
    policy = make_policy(llama(), PolicyConfig(dtype="bfloat16", path="shared"))

    def rounded_bytes(tokens):
        with torch.profiler.profile(profile_memory=True) as seen:
            generate(policy, PROMPTS, [0], rows_for(1, 1), SamplingParams(max_new_tokens=tokens))
        return sum(event.cpu_memory_usage for event in seen.key_averages() if event.key == "aten::_to_copy")

    weights = 2 * sum(weight.numel() for weight in policy.parameters())
    few, many = rounded_bytes(4), rounded_bytes(12)
    assert few > weights / 2
    assert many - few < weights  # of activations; weights would be eight times as much
    with policy.autocast():  # what was rounded without a gradient is not taken for training
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


def windowed() -> Any:
    return _made(transformers.MistralConfig(**{**SMALL, "num_key_value_heads": 2, "sliding_window": 4}))


def soft_capped() -> Any:
    layers = {"num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2}
    return _made(transformers.Gemma2Config(**{**SMALL, **layers, "final_logit_softcapping": 3.0}))


@pytest.mark.parametrize(
    ("make", "reason"),
    [(windowed, "attends within a sliding window of 4 tokens"), (soft_capped, "come out differently")],
    ids=["sliding window", "soft-capped logits"],
)
def test_a_family_that_cannot_share_says_why_and_trains_all_the_same(make, reason):
    model = make()
    policy = make_policy(copy.deepcopy(model), PolicyConfig())
    assert not policy.shares_prompts
    assert reason in policy.why_plain
    completions = generate(policy, PROMPTS, OF, ROWS, SAMPLING)
    scored = score(policy, PROMPTS, OF, completions, SAMPLING)
    stored = torch.nn.utils.rnn.pad_sequence([each.logps for each in completions], batch_first=True)
    assert_close(scored.logp, stored, atol=1e-4, rtol=0)
    with pytest.raises(UserError, match=f"{type(model).__name__} cannot share prompts: .*{reason}"):
        make_policy(copy.deepcopy(model), PolicyConfig(path="shared"))


def test_a_shared_model_called_without_a_layout_says_what_to_do():
    policy = make_policy(llama(), PolicyConfig(path="shared"))
    with pytest.raises(RuntimeError, match="set_attn_implementation"):
        policy.causal_lm(torch.tensor([[1, 2]]))


def test_passes_hold_whole_groups_and_no_more_than_they_may():
    of, prompt_tokens, tokens = [0, 0, 1, 1, 1, 2], [10, 10, 5, 5, 5, 20], [3, 4, 5, 6, 7, 8]

    def cut(rows: int, most: int | None = None) -> list[list[int]]:
        found = split_into_passes(of, prompt_tokens, tokens, rows_per_pass=rows, tokens_per_pass=most)
        return [part.tolist() for part in found]

    assert cut(6) == [[0, 1, 2, 3, 4, 5]]
    assert cut(4) == [[0, 1], [2, 3, 4, 5]]
    assert cut(2) == [[0, 1], [2, 3], [4, 5]]
    assert cut(1) == [[0], [1], [2], [3], [4], [5]]
    assert cut(6, 40) == [[0, 1, 2, 3, 4], [5]]  # 17 + 23, then 28
    assert cut(6, 39) == [[0, 1], [2, 3, 4], [5]]
    assert cut(6, 16) == [[0], [1], [2, 3], [4], [5]]  # 5 + 5 + 6 fits; the last row is larger than the budget


def test_cutting_does_not_change_the_gradient():
    policy = make_policy(llama().double(), PolicyConfig(dtype="float64", path="shared"))
    completions = generate(policy, PROMPTS, OF, ROWS, SAMPLING)
    sizes = [len(PROMPTS[prompt]) for prompt in OF], [len(each) for each in completions]
    found = []
    for limits in ({"rows_per_pass": 6}, {"rows_per_pass": 2}, {"rows_per_pass": 6, "tokens_per_pass": 12}):
        policy.zero_grad()
        for rows in split_into_passes(OF, *sizes, **limits):
            part = [completions[row] for row in rows]
            scored = score(policy, PROMPTS, [OF[row] for row in rows], part, SAMPLING)
            (scored.logp.square().sum()).backward()
        found.append(torch.cat([weight.grad.flatten() for weight in policy.parameters()]))
    for other in found[1:]:
        assert (other - found[0]).norm() < 1e-6 * found[0].norm()


def test_a_model_that_turns_long_rows_otherwise_is_kept_to_short_ones():
    """Beyond the length it was made with, longrope turns all tokens of a row anew: sampled and scored would differ."""
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
    assert make_policy(long, PolicyConfig()).longest == 16
    assert make_policy(llama(max_position_embeddings=64), PolicyConfig()).longest == 64


def test_a_small_model_loads_without_a_progress_bar(tmp_path, capfd):
    llama().save_pretrained(tmp_path)
    transformers.utils.logging.enable_progress_bar()
    load_policy(PolicyConfig(str(tmp_path)))
    assert "Loading weights" not in capfd.readouterr().err
    assert transformers.utils.logging.is_progress_bar_enabled(), "others get theirs all the same"
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "Loading weights" in capfd.readouterr().err
