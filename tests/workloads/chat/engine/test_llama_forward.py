"""The shorter forward of Llama-like models: who gets it, and that it computes what the model does."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny.llama import FAMILIES, llama, qwen3, qwen3_moe
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.workloads.chat.config import PolicyConfig
from groupwise.workloads.chat.engine.forward import StockForward
from groupwise.workloads.chat.engine.llama_forward import (
    LlamaForward,
    apply_rotary,
    llama_forward,
    rms_norm,
    rotary_tables,
)
from groupwise.workloads.chat.engine.packing import pack_batch
from groupwise.workloads.chat.engine.policy import make_policy


def forward_of(policy):
    return type(policy._forwards[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_like_models_get_it_and_others_keep_their_own(family):
    policy = make_policy(FAMILIES[family](), PolicyConfig(forward="shared_prefix"))
    assert forward_of(policy) is (LlamaForward if family in ("llama", "qwen3", "qwen3_moe") else StockForward)


def test_models_with_adapters_and_gradient_checkpointing_get_it_too():
    policy = make_policy(llama(), PolicyConfig(lora_rank=2, reference="adapter", gradient_checkpointing=True))
    assert forward_of(policy) is LlamaForward
    copied = make_policy(llama(), PolicyConfig(reference="copy"))
    assert [type(forward) for forward in copied._forwards] == [LlamaForward, LlamaForward]
    assert copied._forwards[0].model is not copied._forwards[1].model


def test_a_model_with_llamas_module_names_but_another_computation_keeps_its_own():
    """Scaled outputs (as in Granite) under Llama's names: the comparison detects it."""
    model = llama()

    class Doubled(type(model.model.layers[0].mlp)):
        def forward(self, values):
            return 2 * super().forward(values)

    for layer in model.model.layers:
        layer.mlp.__class__ = Doubled
    assert llama_forward(model.model) is not None
    policy = make_policy(model, PolicyConfig(forward="shared_prefix"))
    assert forward_of(policy) is StockForward


def test_hooks_are_still_called():
    model, calls = llama(), []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    policy = make_policy(model, PolicyConfig(forward="shared_prefix"))
    calls.clear()
    packed = pack_batch([[3, 4]], [[[5]]], policy.device)
    policy.hidden(packed.ids[None], packed.position_ids[None], packed)
    assert calls == [1]


def test_a_copy_of_a_policy_computes_with_its_own_weights():
    policy = make_policy(llama(), PolicyConfig())
    packed = pack_batch([[3, 4]], [[[5]]], policy.device)
    twin = copy.deepcopy(policy)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
    inputs = packed.ids[None], packed.position_ids[None], packed
    assert policy.hidden(*inputs).abs().max() > 0
    assert twin.hidden(*inputs).abs().max() == 0


@pytest.mark.parametrize("make", [llama, qwen3, qwen3_moe])
def test_hidden_states_and_gradients_are_those_of_the_models_own_forward(make):
    policy = make_policy(make(), PolicyConfig())
    packed = pack_batch([[3, 4, 5], [6, 7]], [[[1, 2], [7]], [[8, 9, 1]]], policy.device)
    inputs = packed.ids[None], packed.position_ids[None], packed
    results = []
    for forward in (LlamaForward(policy.causal_lm.base_model), StockForward(policy.causal_lm.base_model)):
        policy.zero_grad()
        hidden = forward(*inputs)
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        grads = [weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None]
        with torch.inference_mode():
            results.append((hidden.detach(), forward(*inputs).clone(), torch.cat(grads)))
    for shorter, own in zip(*results, strict=True):
        assert (shorter - own).norm() <= 1e-5 * own.norm()


def test_rms_norm_by_hand():
    # mean of squares of (1, 7) is 25: x / 5 times the weight
    values, weight = torch.tensor([[1.0, 7.0]]), torch.tensor([10.0, 1.0])
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert_close(rms_norm(values, weight, 0.0), torch.tensor([[2.0, 1.4]]))


def test_rotary_by_a_quarter_turn_by_hand():
    # cos 0, sin 1: the second half becomes the first with a minus, and the first the second
    rotary = rotary_tables(torch.zeros(1, 1, 4), torch.ones(1, 1, 4))
    assert apply_rotary(torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]]), rotary).tolist() == [[[[-3.0, -4.0, 1.0, 2.0]]]]


def test_hand_written_gradients_are_those_of_autograd():
    torch.manual_seed(0)
    values, weight = torch.randn(2, 3, 2, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    cos, sin = torch.randn(2, 3, 8), torch.randn(2, 3, 8)

    def by_hand():
        return apply_rotary(rms_norm(values, weight, 1e-6), rotary_tables(cos, sin))

    def by_autograd():
        normed = weight * values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6)
        swapped = torch.cat((-normed[..., 4:], normed[..., :4]), -1)
        return normed * cos[:, :, None] + swapped * sin[:, :, None]

    mix = torch.randn(2, 3, 2, 8)
    for one, other in zip(
        *(torch.autograd.grad((mix * f()).sum(), (values, weight)) for f in (by_hand, by_autograd)), strict=True
    ):
        assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_in_the_last_layer_only_tokens_whose_logits_are_needed_go_on_after_attention():
    """Its output projection and the three products of its MLP; everything before them gets every token."""
    policy = make_policy(llama(), PolicyConfig())
    packed = pack_batch([[3, 4, 5, 6, 7], [6, 7, 8]], [[[1, 2], [7]], [[8, 9, 1]]], policy.device)
    rows = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator is torch.ops.aten.mm.default:
                rows.append(len(args[0]))
            return operator(*args, **(kwargs or {}))

    with torch.no_grad(), Products():
        hidden = policy.hidden(packed.ids[None], packed.position_ids[None], packed)
    all_tokens, needed = 8 + 6, 2 + 6
    assert rows == [all_tokens] * 7 + [all_tokens] * 3 + [needed] * 4
    assert len(hidden) == needed
