"""Chat on the device: shared prompts, ties, precision, and how often the host waits."""

from dataclasses import replace

import pytest
import torch
from tiny.llama import llama, ragged_prompts, rows_for

from accelerator.steps import small_recipe
from groupwise.dist.devices import move_module
from groupwise.training.loop import train_step
from groupwise.training.preflight import _tied_weights_are_one, preflight
from groupwise.training.setup import set_up
from groupwise.workloads.chat.config import STOP_CHECK_STEPS, PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.generate import generate
from groupwise.workloads.chat.engine.packing import ATTENTION_VARIABLE, choose_attention
from groupwise.workloads.chat.engine.policy import make_policy
from groupwise.workloads.chat.engine.score import score

SAMPLING = SamplingParams(max_new_tokens=20, stop_token_ids=(5, 9, 11))
PROMPTS, OF_ROW = ragged_prompts(3), [0, 0, 1, 1, 2, 2]


def policy_on(device, **settings):
    return make_policy(move_module(llama(tie_word_embeddings=True), device), PolicyConfig("tiny", **settings))


def complete(policy, **changes):
    return generate(policy, PROMPTS, OF_ROW, rows_for(3, 2), replace(SAMPLING, **changes), decode_rows=4)


def gradients(policy, completions):
    policy.zero_grad(set_to_none=True)
    scores = score(policy, PROMPTS, OF_ROW, completions, SAMPLING)
    (scores.logp.sum() + 0.1 * scores.entropy.sum()).backward()
    return scores, {name: weight.grad.cpu() for name, weight in policy.named_parameters()}


@pytest.fixture
def only_attention(monkeypatch):
    """Attention by the kernel of a name alone, on all devices."""

    def choose(name: str) -> None:
        monkeypatch.setenv(ATTENTION_VARIABLE, name)
        choose_attention.cache_clear()

    yield choose
    choose_attention.cache_clear()


@pytest.mark.parametrize("forward", ["shared_prefix", "products", "plain"])
@pytest.mark.parametrize("changes", [{}, {"top_k": 7, "temperature": 0.8}])
def test_completions_and_gradients_are_those_of_the_cpu(device, only_attention, forward, changes):
    if forward == "products":
        forward = "shared_prefix"
        only_attention("products")
    here, there = (policy_on(where, forward=forward, reference="copy") for where in (torch.device("cpu"), device))
    assert there.shares_prefix == (forward == "shared_prefix")
    expected, actual = complete(here, **changes), complete(there, **changes)
    assert [completion.ids for completion in actual] == [completion.ids for completion in expected]
    assert [completion.stopped for completion in actual] == [completion.stopped for completion in expected]
    assert len({len(completion) for completion in actual}) > 1  # some rows end between two looks
    if not changes:
        (scores, computed), (wanted_scores, wanted) = gradients(there, expected), gradients(here, expected)
        torch.testing.assert_close(scores.logp, wanted_scores.logp, rtol=1e-4, atol=1e-5)
        assert computed.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(computed[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


def test_head_and_embedding_are_one_weight_in_policy_and_reference(device):
    policy = policy_on(device, reference="copy")
    for model in (policy.model, policy.reference_model):
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert [check.passed for check in _tied_weights_are_one(policy)] == [True]
    apart = torch.nn.Parameter(policy.model.get_output_embeddings().weight.detach().clone())
    policy.model.get_output_embeddings().weight = apart
    (check,) = _tied_weights_are_one(policy)
    assert not check.passed
    assert "move_module" in check.detail


def test_the_host_waits_once_in_a_block_of_tokens_and_twice_in_a_training_pass(device, counters):
    policy = policy_on(device)
    counters.reset_counters()
    completions = generate(policy, PROMPTS, OF_ROW, rows_for(3, 2), SAMPLING, decode_rows=6)
    steps = max(map(len, completions))
    assert counters.counters()["host_syncs"] <= 3 + -(-steps // STOP_CHECK_STEPS)  # first tokens, two copies at the end
    counters.reset_counters()
    gradients_of = score(policy, PROMPTS, OF_ROW, completions, SAMPLING)
    gradients_of.logp.sum().backward()
    assert counters.counters()["host_syncs"] <= 2


KERNELS_OF_A_STEP = {"overrideable": 8000, "products": 13000}


@pytest.mark.parametrize("name", KERNELS_OF_A_STEP)
def test_a_step_of_the_recipe_waits_a_few_times_and_its_preflight_names_the_kernel(
    device, counters, only_attention, name
):
    if name == "products":
        only_attention(name)
    setup = set_up(small_recipe("chat", device=device.type))
    checks = {check.name: check for check in preflight(setup)}
    assert all(check.passed for check in checks.values())
    label = {"overrideable": "torch's fused kernel (_scaled_dot_product_fused_attention_overrideable)"}
    assert f"attention by {label.get(name, 'matrix products in float32')}" in checks["note"].detail
    train_step(setup)
    counters.reset_counters()
    metrics = train_step(setup).metrics
    assert counters.counters()["kernels"] < KERNELS_OF_A_STEP[name]
    waits = counters.counters()["host_syncs"]
    assert waits < 30
    assert metrics["host_syncs"] <= waits
