"""Attention over a packed sequence."""

import torch
from torch.testing import assert_close

from groupwise.workloads.chat.engine.packing import pack_batch, packed_attention_flash, packed_attention_flex


def test_flash_and_flex_are_the_same_attention():
    """Flex attention, which other devices use, against the flash kernels of the CPU."""
    torch.manual_seed(1)
    packed = pack_batch([[3, 4, 5], [6]], [[[1, 2], [7], []], [[8, 9, 1, 2, 3]]], torch.device("cpu"))
    query, key, value = (torch.randn(1, heads, len(packed.ids), 16) for heads in (4, 2, 2))
    flash = packed_attention_flash(query, key, value, packed, 0.3)
    assert_close(flash, packed_attention_flex(query, key, value, packed.block_mask, 0.3))
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 3, 4, 3, 1, 2, 3, 4, 5]
