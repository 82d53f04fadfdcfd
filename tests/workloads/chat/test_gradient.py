"""The shared prompt, the packed row and the chunked head against transformers' own forward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

from groupwise.workloads.chat.config import PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine import logprobs as head_module
from groupwise.workloads.chat.engine.attention import attend, attention_eager, merge_by_lse
from groupwise.workloads.chat.engine.generate import generate
from groupwise.workloads.chat.engine.packing import pack_batch, packed_attention_flash, packed_attention_flex
from groupwise.workloads.chat.engine.policy import make_policy
from groupwise.workloads.chat.engine.score import score
from workloads.chat.models import FAMILIES, gpt2, llama, ragged_prompts, rows_for

STOPS = tuple(range(5, 17))
FREE = SamplingParams(max_new_tokens=10, stop_ids=STOPS)
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
    kinds = ("plain", "shared")
    return [make_policy(copy.deepcopy(model), PolicyConfig(dtype=dtype, path=path, **settings)) for path in kinds]


def assert_same_gradient(policies, sampling, tolerance, **options):
    plain, shared = policies
    rows = rows_for(3, 4)
    of = rows.condition.tolist()
    completions = generate(plain, PROMPTS, of, rows, sampling)
    assert len({len(each) for each in completions}) > 2, "ragged lengths are what is tested"
    expected, wanted = gradient(plain, completions, of, sampling, **options)
    found, got = gradient(shared, completions, of, sampling, **options)
    assert_close(found.logp, expected.logp, atol=1e-9, rtol=0)
    assert_close(found.entropy, expected.entropy, atol=1e-9, rtol=0)
    assert (got - wanted).norm() <= tolerance * wanted.norm()


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
    (_, wanted), (_, got) = (gradient(policy, completions, of, FREE) for policy in policies)
    assert torch.equal(wanted, got)


def test_bfloat16_is_near_and_trains_float32_weights():
    model = llama()
    exact = make_policy(copy.deepcopy(model), PolicyConfig())
    rounded = make_policy(copy.deepcopy(model), PolicyConfig(dtype="bfloat16"))
    rows = rows_for(3, 4)
    of = rows.condition.tolist()
    completions = generate(rounded, PROMPTS, of, rows, FREE)
    (_, wanted), (scored, got) = (gradient(policy, completions, of, FREE) for policy in (exact, rounded))
    stored = torch.nn.utils.rnn.pad_sequence([each.logps for each in completions], batch_first=True)
    assert scored.logp.dtype == got.dtype == torch.float32
    assert 0 < (scored.logp - stored).abs().max() < 0.1
    assert torch.nn.functional.cosine_similarity(got, wanted, dim=0) > 0.99


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("narrow", [False, True])
def test_the_chunked_head_has_the_gradient_of_log_softmax(monkeypatch, temperature, narrow):
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((150, 6), (40, 6), (40,)))
    ids = torch.randint(40, (150,))
    kept = torch.randint(1, 40, (150,)) if narrow else None
    mixes = torch.randn(2, 150, dtype=torch.float64)
    mixes[0, 30:90] = 0  # a row without gradient is left out of the products
    found = []
    for chunk in (40 * 64, 1 << 21):
        monkeypatch.setattr(head_module, "LOGITS_PER_CHUNK", chunk)
        for mix in (mixes, mixes * torch.tensor([[1.0], [0.0]], dtype=torch.float64)):
            leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
            head = head_module.OutputHead(leaves[1], leaves[2], torch.float64)
            logps, entropies = head_module.token_logprobs(head, leaves[0], ids, kept, temperature)
            found.append(torch.autograd.grad((mix[0] * logps + mix[1] * entropies).sum(), leaves))
            leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
            scaled = (leaves[0] @ leaves[1].T + leaves[2]) / temperature
            if kept is not None:
                edge = scaled.detach().sort(descending=True).values.gather(1, kept[:, None] - 1)
                out = (scaled.detach() < edge) & (torch.arange(40)[None] != ids[:, None])
                scaled = scaled.masked_fill(out, -1e9)
            logp = scaled.log_softmax(-1)
            plain = (mix[0] * logp.gather(1, ids[:, None])[:, 0] - mix[1] * (logp.exp() * logp).sum(-1)).sum()
            for got, wanted in zip(found[-1], torch.autograd.grad(plain, leaves), strict=True):
                assert_close(got, wanted, atol=1e-10, rtol=1e-9)


def test_no_tensor_of_tokens_by_vocabulary_is_ever_held(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(head_module, "LOGITS_PER_CHUNK", 4096)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            nonlocal largest
            out = operator(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple | list) else [out]:
                largest = max(largest, each.numel() if isinstance(each, torch.Tensor) else 0)
            return out

    hidden, weight = torch.randn(2000, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    with Watch():
        logps, _ = head_module.token_logprobs(
            head_module.OutputHead(weight, None, torch.float32), hidden, torch.randint(500, (2000,)), None, 1.0
        )
        logps.sum().backward()
    assert 0 < largest <= 64 * 500 < 2000 * 500 / 10


@pytest.mark.parametrize("causal", [False, True])
def test_flash_and_products_are_the_same_attention_and_log_sum_exp(causal):
    torch.manual_seed(2)
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    bias = None if causal else torch.zeros(2, 1, 1, 5).masked_fill(torch.arange(5) > 3, -torch.inf)
    flash = attend(query, key, value, scale=0.3, causal=causal, bias=bias)
    for ours, theirs in zip(
        attention_eager(query, key, value, scale=0.3, causal=causal, bias=bias), flash, strict=True
    ):
        assert_close(ours, theirs)


def test_attention_over_two_sets_of_keys_is_merged_exactly():
    query, key, value = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    whole, _ = attend(query, key, value, scale=0.5)
    halves = [attend(query, key[:, :, part], value[:, :, part], scale=0.5) for part in (slice(0, 4), slice(4, 9))]
    assert_close(merge_by_lse(*halves[0], *halves[1]), whole)


def test_parts_and_blocks_are_the_same_attention():
    """The path of other devices (flex attention) beside that of the CPU."""
    torch.manual_seed(1)
    packed = pack_batch([[3, 4, 5], [6]], [[[1, 2], [7], []], [[8, 9, 1, 2, 3]]], torch.device("cpu"))
    query, key, value = (torch.randn(1, heads, len(packed.ids), 16) for heads in (4, 2, 2))
    by_parts = packed_attention_flash(query, key, value, packed, 0.3)
    assert_close(by_parts, packed_attention_flex(query, key, value, packed.block_mask, 0.3))
    assert packed.positions.tolist() == [0, 1, 2, 0, 3, 4, 3, 1, 2, 3, 4, 5]
