"""Tiny random models of the real classes, and samples for them."""

from __future__ import annotations

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration, OlmoeConfig, SiglipVisionConfig

from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.knobs import KnobOptions

WORDS, IMAGE_TOKEN, SIDE = 40, 39, 8
CROPS = {"low": 1, "medium": 2, "high": 4}


def llava_olmoe(*, renormalize: bool = False, kv_heads: int = 4) -> LlavaForConditionalGeneration:
    """LLaVA's composition of SigLIP and OLMoE, 8 blocks, top-4 of 6 experts."""
    torch.manual_seed(3)
    text = OlmoeConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        num_experts=6,
        num_experts_per_tok=4,
        norm_topk_prob=renormalize,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_channels=1,
        image_size=SIDE,
        patch_size=4,
        vision_use_head=False,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():  # the placeholder is never the best next token: it ties with the word before it
        model.lm_head.weight[IMAGE_TOKEN] = model.lm_head.weight[IMAGE_TOKEN - 1]
    return model


OPTIONS = KnobOptions(
    crops=CROPS,
    total_blocks=8,
    full_top_k=4,
    drop_order=(6, 4, 2, 7, 5, 1, 3),
    insertion_positions=(1, 2, 3),
    most_dropped=3,
    smallest_top_k=1,
)


def sample(number: int) -> Sample:
    source = torch.Generator().manual_seed(number)
    overview = torch.randn(1, 1, SIDE, SIDE, generator=source)
    crops = {
        tier: torch.cat([overview, torch.randn(count, 1, SIDE, SIDE, generator=source)])
        for tier, count in CROPS.items()
    }
    length = 1 + int(torch.randint(5, (), generator=source))
    question = tuple(torch.randint(1, IMAGE_TOKEN, (length,), generator=source).tolist())
    return Sample(f"sample {number}", crops, question)
