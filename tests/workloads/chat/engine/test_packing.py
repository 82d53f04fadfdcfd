"""Attention over a packed sequence."""

import torch
from torch.testing import assert_close

from groupwise.workloads.chat.engine import attention
from groupwise.workloads.chat.engine.packing import (
    pack_batch,
    packed_attention_flash,
    packed_attention_flex,
    packed_attention_products,
    packed_kernel,
)

RAGGED = [[3, 4, 5], [6], [1, 2, 3, 4, 5]], [[[1, 2], [7], []], [[8, 9, 1, 2, 3]], [[]]]
"""Prompts, and completions of each; one prompt has none with a token."""


def test_flash_and_flex_are_the_same_attention():
    """Flex attention, which other devices use, against the flash kernels of the CPU."""
    torch.manual_seed(1)
    packed = pack_batch([[3, 4, 5], [6]], [[[1, 2], [7], []], [[8, 9, 1, 2, 3]]], torch.device("cpu"))
    query, key, value = (torch.randn(1, heads, len(packed.ids), 16) for heads in (4, 2, 2))
    flash = packed_attention_flash(query, key, value, packed, 0.3)
    assert_close(flash, packed_attention_flex(query, key, value, packed.block_mask, 0.3))
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 3, 4, 3, 1, 2, 3, 4, 5]


def random_inputs(dtype, packed, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, len(packed.ids), 6) for heads in (4, 2, 2)]
    return [torch.randn(shape, dtype=dtype, generator=generator, requires_grad=True) for shape in shapes]


def test_attention_by_products_is_that_of_the_flash_kernels_with_its_gradients():
    packed = pack_batch(*RAGGED, torch.device("cpu"))
    inputs = random_inputs(torch.float64, packed)
    by_kernel = []
    for attention_over in (packed_attention_flash, packed_attention_products):
        out = attention_over(*inputs, packed, 0.3)
        by_kernel.append((out, *torch.autograd.grad(out.square().sum() + out[..., 0].sum(), inputs)))
    for flash, products in zip(*by_kernel, strict=True):
        assert_close(products, flash, rtol=0, atol=1e-12)


def test_the_gradient_of_attention_by_products_is_that_of_finite_differences():
    packed = pack_batch([[3, 4], [6]], [[[1, 2], [7]], [[8]]], torch.device("cpu"))
    assert torch.autograd.gradcheck(
        lambda *inputs: packed_attention_products(*inputs, packed, 0.4), random_inputs(torch.float64, packed)
    )


def test_products_in_chunks_are_the_same(monkeypatch):
    packed = pack_batch(*RAGGED, torch.device("cpu"))
    inputs = random_inputs(torch.float64, packed)
    results = []
    for scores in (1 << 24, 24, 1):  # all together, some queries of a row, one query
        monkeypatch.setattr(attention, "_SCORES_PER_CHUNK", scores)
        out = packed_attention_products(*inputs, packed, 0.3)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for whole, *chunked in zip(*results, strict=True):
        for part in chunked:
            assert_close(part, whole, rtol=0, atol=1e-12)


def test_the_cpu_has_its_own_kernel():
    assert (packed_kernel(torch.device("cpu")).name, packed_kernel(torch.device("cpu")).reason) == ("flash", "")
    unknown = packed_kernel(torch.device("meta"))
    assert unknown.name == "products"
    assert "meta" in unknown.reason
