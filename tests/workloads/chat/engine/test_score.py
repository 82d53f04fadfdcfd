"""Log-probs and gradients with shared prompts against transformers' own forward; rows of a pass."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny.llama import FAMILIES, gpt2, llama, ragged_prompts, rows_for
from torch.testing import assert_close

from groupwise.workloads.chat.config import PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.generate import generate
from groupwise.workloads.chat.engine.policy import make_policy
from groupwise.workloads.chat.engine.score import score, split_into_passes

STOPS = tuple(range(5, 17))
FREE = SamplingParams(max_new_tokens=10, stop_token_ids=STOPS)
NARROW = SamplingParams(0.8, 20, 0.9, 10, STOPS)
PROMPTS = ragged_prompts(3)


def gradient(policy, completions, of, sampling, *, entropy=True):
    """Of an uneven mix of log-probabilities and entropies."""
    scored = score(policy, PROMPTS, of, completions, sampling)
    mix = torch.linspace(-1, 2, scored.logp.numel(), dtype=scored.logp.dtype).view_as(scored.logp)
    total = (mix * scored.logp).sum()
    if entropy:
        total = total + (mix.flip(0) * scored.entropy).sum()
    policy.zero_grad()
    total.backward()
    weights = [weight.grad.flatten() for weight in policy.parameters() if weight.requires_grad]
    return scored, torch.cat(weights)


def both(model, dtype="float64", **settings):
    return [
        make_policy(copy.deepcopy(model), PolicyConfig(dtype=dtype, forward=forward, **settings))
        for forward in ("plain", "shared_prefix")
    ]


def assert_same_gradient(policies, sampling, tolerance, **options):
    plain, shared = policies
    rows = rows_for(3, 4)
    of = rows.condition.tolist()
    completions = generate(plain, PROMPTS, of, rows, sampling)
    assert len({len(completion) for completion in completions}) > 2, "ragged lengths are what is tested"
    expected, expected_gradient = gradient(plain, completions, of, sampling, **options)
    scores, shared_gradient = gradient(shared, completions, of, sampling, **options)
    assert_close(scores.logp, expected.logp, atol=1e-9, rtol=0)
    assert_close(scores.entropy, expected.entropy, atol=1e-9, rtol=0)
    assert (shared_gradient - expected_gradient).norm() <= tolerance * expected_gradient.norm()


@pytest.mark.parametrize("sampling", [FREE, NARROW], ids=["free", "top-k and top-p"])
def test_the_gradient_is_that_of_the_plain_computation_to_1e_9_in_float64(sampling):
    assert_same_gradient(both(gpt2().double()), sampling, 1e-9)


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmoe", "qwen3_moe"])
def test_families_that_cast_inside_agree_to_1e_6(family):
    assert_same_gradient(both(FAMILIES[family]().double()), FREE, 1e-6)


@pytest.mark.parametrize("key_value_heads", [1, 4])
def test_grouped_query_heads(key_value_heads):
    assert_same_gradient(both(llama(key_value_heads=key_value_heads).double()), NARROW, 1e-6, entropy=False)


def test_lora_trains_the_same_adapter():
    policies = both(llama().double(), lora_rank=4)
    for policy in policies:
        with torch.no_grad():
            for name, weight in policy.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))
    assert_same_gradient(policies, FREE, 1e-6)
    assert all("lora" in name for name, weight in policies[1].named_parameters() if weight.requires_grad)


def test_gradient_checkpointing_changes_nothing():
    model = llama().double()
    policies = [
        make_policy(copy.deepcopy(model), PolicyConfig(dtype="float64", gradient_checkpointing=on))
        for on in (False, True)
    ]
    assert not policies[0].causal_lm.model.layers[0].training
    assert policies[1].causal_lm.model.layers[0].training
    rows = rows_for(3, 4)
    of = rows.condition.tolist()
    completions = generate(policies[1], PROMPTS, of, rows, FREE)
    (_, kept), (_, recomputed) = (gradient(policy, completions, of, FREE) for policy in policies)
    assert torch.equal(kept, recomputed)


def test_bfloat16_is_near_and_trains_float32_weights():
    model = llama()
    exact = make_policy(copy.deepcopy(model), PolicyConfig())
    rounded = make_policy(copy.deepcopy(model), PolicyConfig(dtype="bfloat16"))
    rows = rows_for(3, 4)
    of = rows.condition.tolist()
    completions = generate(rounded, PROMPTS, of, rows, FREE)
    (_, expected), (scored, actual) = (gradient(policy, completions, of, FREE) for policy in (exact, rounded))
    stored = torch.nn.utils.rnn.pad_sequence([completion.logps for completion in completions], batch_first=True)
    assert scored.logp.dtype == actual.dtype == torch.float32
    assert 0 < (scored.logp - stored).abs().max() < 0.1
    assert torch.nn.functional.cosine_similarity(actual, expected, dim=0) > 0.99


def test_passes_hold_whole_groups_within_their_limits():
    of, prompt_tokens, tokens = [0, 0, 1, 1, 1, 2], [10, 10, 5, 5, 5, 20], [3, 4, 5, 6, 7, 8]

    def split(rows: int, max_tokens: int | None = None) -> list[list[int]]:
        passes = split_into_passes(of, prompt_tokens, tokens, rows_per_pass=rows, tokens_per_pass=max_tokens)
        return [rows.tolist() for rows in passes]

    assert split(6) == [[0, 1, 2, 3, 4, 5]]
    assert split(4) == [[0, 1], [2, 3, 4, 5]]
    assert split(2) == [[0, 1], [2, 3], [4, 5]]
    assert split(1) == [[0], [1], [2], [3], [4], [5]]
    assert split(6, 40) == [[0, 1, 2, 3, 4], [5]]  # 17 + 23, then 28
    assert split(6, 39) == [[0, 1], [2, 3, 4], [5]]
    assert split(6, 16) == [[0], [1], [2, 3], [4], [5]]  # 5 + 5 + 6 fits; the last row is larger than the budget


def test_how_rows_are_split_does_not_change_the_gradient():
    policy = make_policy(llama().double(), PolicyConfig(dtype="float64", forward="shared_prefix"))
    rows = rows_for(3, 2)
    of = rows.condition.tolist()
    completions = generate(policy, PROMPTS, of, rows, FREE)
    sizes = [len(PROMPTS[prompt]) for prompt in of], [len(completion) for completion in completions]
    gradients = []
    for limits in ({"rows_per_pass": 6}, {"rows_per_pass": 2}, {"rows_per_pass": 6, "tokens_per_pass": 12}):
        policy.zero_grad()
        for rows in split_into_passes(of, *sizes, **limits):
            part = [completions[row] for row in rows]
            scored = score(policy, PROMPTS, [of[row] for row in rows], part, FREE)
            (scored.logp.square().sum()).backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in policy.parameters()]))
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() < 1e-6 * gradients[0].norm()
