"""Attention over a packed sequence."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.workloads.chat.engine import attention
from groupwise.workloads.chat.engine.attention import FUSED_KERNELS, FusedKernel
from groupwise.workloads.chat.engine.packing import (
    ATTENTION_VARIABLE,
    AttentionShape,
    ByParts,
    Flex,
    choose_attention,
    disagreement,
    pack_batch,
)

RAGGED = [[3, 4, 5], [6], [1, 2, 3, 4, 5]], [[[1, 2], [7], []], [[8, 9, 1, 2, 3]], [[]]]
"""Prompts, and completions of each; one prompt has none with a token."""
ON_CPU = AttentionShape("cpu", torch.float32, heads=4, key_heads=2, width=6)


def operation_of_the_cpu(**settings):
    return ByParts(FusedKernel("another", "_scaled_dot_product_flash_attention_for_cpu", **settings))


def test_flex_is_the_same_attention():
    packed = pack_batch([[3, 4, 5], [6]], [[[1, 2], [7], []], [[8, 9, 1, 2, 3]]], torch.device("cpu"))
    inputs = [torch.randn(1, heads, len(packed.ids), 16) for heads in (4, 2, 2)]
    assert_close(ByParts()(inputs, packed, 0.3), Flex()(inputs, packed, 0.3))
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 3, 4, 3, 1, 2, 3, 4, 5]


def random_inputs(dtype, packed, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, len(packed.ids), 6) for heads in (4, 2, 2)]
    return [torch.randn(shape, dtype=dtype, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(
    "settings",
    [
        {"shares_key_heads": True, "takes_bias": True, "batches_prompts": False},  # the CPU's own
        {"shares_key_heads": True, "takes_bias": True},
        {"shares_key_heads": True},  # without a bias, only prompts of the same length go together
        {"width_multiple": 8},
    ],
)
def test_attention_by_fused_kernels_is_that_of_products_with_its_gradients(settings):
    packed = pack_batch(*RAGGED, torch.device("cpu"))
    inputs = random_inputs(torch.float64, packed)
    by_kernel = []
    for attend in (operation_of_the_cpu(**settings), ByParts()):
        out = attend(inputs, packed, 0.3)
        by_kernel.append((out, *torch.autograd.grad(out.square().sum() + out[..., 0].sum(), inputs)))
    for fused, products in zip(*by_kernel, strict=True):
        assert_close(fused, products, rtol=0, atol=1e-12)


def test_the_gradient_of_attention_by_products_is_that_of_finite_differences():
    packed = pack_batch([[3, 4], [6]], [[[1, 2], [7]], [[8]]], torch.device("cpu"))
    inputs = random_inputs(torch.float64, packed)
    assert torch.autograd.gradcheck(lambda *leaves: ByParts()(leaves, packed, 0.4), inputs)


def test_products_in_chunks_are_the_same(monkeypatch):
    packed = pack_batch(*RAGGED, torch.device("cpu"))
    inputs = random_inputs(torch.float64, packed)
    results = []
    for scores in (1 << 24, 24, 1):  # all together, some queries of a row, one query
        monkeypatch.setattr(attention, "_SCORES_PER_CHUNK", scores)
        out = ByParts()(inputs, packed, 0.3)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for whole, *chunked in zip(*results, strict=True):
        for part in chunked:
            assert_close(part, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_cpu_has_its_own_kernel(dtype):
    chosen = choose_attention(ON_CPU._replace(dtype=dtype))
    assert (chosen.attend, chosen.reason) == (ByParts(FUSED_KERNELS[0]), "")
    assert chosen.kernel is FUSED_KERNELS[0]  # decoding's, too
    assert [kernel.name for kernel in FUSED_KERNELS if kernel.is_on(torch.device("cpu"))] == ["flash-cpu"]


def test_a_kernel_that_raises_is_not_chosen_and_the_reason_says_so():
    chosen = choose_attention(AttentionShape("meta", torch.float32, heads=4, key_heads=2, width=8))
    assert chosen.attend == ByParts()
    assert "flash: RuntimeError" in chosen.reason


def test_what_differs_from_products_is_said():
    class Bent(ByParts):
        def __call__(self, inputs, packed, scale):
            query, key, value = inputs
            return super().__call__((query, key, value * 1.01), packed, scale)

    assert disagreement(ByParts(), ON_CPU) is None
    assert disagreement(Bent(), ON_CPU) == "its outputs differ by 0.01 from those of matrix products"


def test_a_kernel_that_takes_no_notice_of_the_bias_is_found_out():
    class Deaf(FusedKernel):
        def forward(self, inputs, scoring):
            return super().forward(inputs, scoring._replace(bias=None))

    deaf = Deaf("deaf", "_scaled_dot_product_flash_attention_for_cpu", takes_bias=True, shares_key_heads=True)
    assert "outputs differ" in disagreement(ByParts(deaf), ON_CPU)
    assert disagreement(ByParts(replace(deaf, takes_bias=False)), ON_CPU) is None


def test_the_environment_may_name_the_only_kernel_to_try(monkeypatch):
    monkeypatch.setenv(ATTENTION_VARIABLE, "products")
    chosen = choose_attention(ON_CPU._replace(width=10))
    assert (chosen.attend, chosen.reason) == (ByParts(), "GROUPWISE_ATTENTION is 'products'")
    monkeypatch.setenv(ATTENTION_VARIABLE, "flash-cpu")
    assert choose_attention(ON_CPU._replace(width=12)).attend.name == "flash-cpu"
    monkeypatch.setenv(ATTENTION_VARIABLE, "flsh")
    with pytest.raises(UserError, match=r"'flsh': name one of flex, .*products"):
        choose_attention(ON_CPU._replace(width=14))
