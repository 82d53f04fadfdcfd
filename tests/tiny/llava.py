"""Tiny random LLaVA models, samples for them, and folders as users have them: saved by transformers itself."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    OlmoeConfig,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
    SiglipVisionConfig,
)

from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.knobs import KnobOptions

WORDS, IMAGE_TOKEN, SIDE = 40, 39, 8
CROPS = {"low": 1, "medium": 2, "high": 4}
IMAGE_WORD = "<image>"
TEMPLATE = (
    "user {% for part in messages[0].content %}"
    "{% if part.type == 'image' %}<image>{% else %} {{ part.text }}{% endif %}{% endfor %} assistant"
)
IMAGE_MEAN = (0.4, 0.5, 0.6)
IMAGE_STD = (0.3, 0.3, 0.2)


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
    crops_by_tier=CROPS,
    total_blocks=8,
    full_top_k=4,
    drop_order=(6, 4, 2, 7, 5, 1, 3),
    insertion_positions=(1, 2, 3),
    max_dropped_blocks=3,
    smallest_top_k=1,
)
MOLMOE = KnobOptions({"low": 3, "medium": 6, "high": 12}, total_blocks=16, full_top_k=8, drop_order=(13, 10, 8, 11))
"""The knobs of MolmoE, a model of the real size."""


def sample(number: int) -> Sample:
    generator = torch.Generator().manual_seed(number)
    overview = torch.randn(1, 1, SIDE, SIDE, generator=generator)
    crops = {
        tier: torch.cat([overview, torch.randn(count, 1, SIDE, SIDE, generator=generator)])
        for tier, count in CROPS.items()
    }
    length = 1 + int(torch.randint(5, (), generator=generator))
    question = tuple(torch.randint(1, IMAGE_TOKEN, (length,), generator=generator).tolist())
    return Sample(f"sample {number}", crops, question)


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = ["<unk>", "user", "assistant", "what", "is", "this", "where"]
    words += [f"word{number}" for number in range(IMAGE_TOKEN - len(words))] + [IMAGE_WORD]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", extra_special_tokens={"image_token": IMAGE_WORD}
    )
    made.chat_template = template
    return made


def color_llava(text: LlamaConfig | None = None) -> LlavaForConditionalGeneration:
    """With three color channels; with OLMoE unless another text model is given."""
    torch.manual_seed(7)
    config = llava_olmoe().config.to_dict()
    config["vision_config"]["num_channels"] = 3
    if text is not None:
        config["text_config"] = text.to_dict()
    return LlavaForConditionalGeneration(LlavaConfig(**config)).eval()


def dense_llava() -> LlavaForConditionalGeneration:
    text = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=8,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    return color_llava(text)


def save_llava(folder: Path, template: str | None = TEMPLATE) -> LlavaForConditionalGeneration:
    model = color_llava()
    model.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    SiglipImageProcessor(image_mean=IMAGE_MEAN, image_std=IMAGE_STD).save_pretrained(folder)
    return model
