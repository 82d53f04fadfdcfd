"""The mosaic model through stock transformers, one configuration at a time: the reference for the executor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.tasks.mosaic.model import BLOCKS
from groupwise.workloads.controller.tasks.mosaic.questions import IMAGE_TOKEN
from groupwise.workloads.controller.tasks.mosaic.scene import Tier, image_tokens


def prompt_ids(question_ids: Sequence[int], tier: Tier) -> Tensor:
    """Input ids [1, tokens] of one question: a placeholder per image token, then the question."""
    return torch.tensor([[IMAGE_TOKEN] * image_tokens(tier) + list(question_ids)])


@contextmanager
def configured(
    model: LlavaForConditionalGeneration, kept_blocks: Sequence[int], top_k: int, insertion_position: int = 1
) -> Iterator[LlavaForConditionalGeneration]:
    """Run only `kept_blocks`, with `top_k` experts in those from `insertion_position` on, inside this context."""
    text = model.model.language_model
    all_blocks = text.layers
    text.layers = nn.ModuleList([all_blocks[block] for block in kept_blocks])
    try:
        for block in all_blocks[insertion_position:]:
            block.mlp.gate.top_k = top_k
        yield model
    finally:
        text.layers = all_blocks
        for block in all_blocks:
            block.mlp.gate.top_k = model.config.text_config.num_experts_per_tok


def kept_blocks(drop_order: Sequence[int], blocks: int, total: int = BLOCKS) -> list[int]:
    """Which blocks run when `blocks` of them are wanted: the first of `drop_order` are dropped first."""
    dropped = set(drop_order[: total - blocks])
    return [block for block in range(total) if block not in dropped]


def answer_logits(
    model: LlavaForConditionalGeneration, crops: Tensor, question_ids: Sequence[int], tier: Tier
) -> Tensor:
    """Logits of the answer's token for one question about one mosaic."""
    ids = prompt_ids(question_ids, tier)
    return model(input_ids=ids, pixel_values=crops, logits_to_keep=1, use_cache=False).logits[0, -1]
