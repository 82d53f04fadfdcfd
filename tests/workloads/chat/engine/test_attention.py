"""Attention with its log-sum-exp: kernels against matrix products."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from groupwise.workloads.chat.engine.attention import FUSED_KERNELS, PRODUCTS, Scoring, merge_by_lse

FLASH = FUSED_KERNELS[0]


@pytest.mark.parametrize("causal", [False, True])
def test_flash_and_products_are_the_same_attention_and_log_sum_exp(causal):
    torch.manual_seed(2)
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    bias = None if causal else torch.zeros(2, 1, 1, 5).masked_fill(torch.arange(5) > 3, -torch.inf)
    flash, products = (kernel.forward((query, key, value), Scoring(0.3, causal, bias)) for kernel in (FLASH, PRODUCTS))
    assert_close(products[:2], flash[:2])


def test_attention_over_two_sets_of_keys_is_merged_exactly():
    query, key, value = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    whole, _, _ = FLASH.forward((query, key, value), Scoring(0.5))
    halves = [
        FLASH.forward((query, key[:, :, part], value[:, :, part]), Scoring(0.5))[:2]
        for part in (slice(0, 4), slice(4, 9))
    ]
    assert_close(merge_by_lse(*halves[0], *halves[1]), whole)


@pytest.mark.parametrize("autocast", [True, False])
def test_products_are_as_exact_in_bfloat16_as_the_fused_kernel(autocast):
    torch.manual_seed(0)
    query, key, value = (2 * torch.randn(1, 2, tokens, 128).bfloat16() for tokens in (3, 256, 256))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output, lse, _ = PRODUCTS.forward((query, key, value), Scoring(128**-0.5))
        fused, fused_lse, _ = FLASH.forward((query, key, value), Scoring(128**-0.5))
    assert_close(lse, fused_lse, atol=1e-3, rtol=1e-4)
    assert_close(output, fused, atol=0.03, rtol=0.02)
