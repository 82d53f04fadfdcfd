"""Folders as users have them: a tiny model, its tokenizer and its image processor, saved by transformers itself."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    SiglipImageProcessor,
)

from workloads.controller import tiny, tiny_qwen

IMAGE_WORD = "<image>"
TEMPLATE = (
    "user {% for part in messages[0].content %}"
    "{% if part.type == 'image' %}<image>{% else %} {{ part.text }}{% endif %}{% endfor %} assistant"
)
SEVERAL_SHADES = (0.4, 0.5, 0.6)


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = ["<unk>", "user", "assistant", "what", "is", "this", "where"]
    words += [f"word{number}" for number in range(tiny.IMAGE_TOKEN - len(words))] + [IMAGE_WORD]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", extra_special_tokens={"image_token": IMAGE_WORD}
    )
    made.chat_template = template
    return made


def llava(text: LlamaConfig | None = None) -> LlavaForConditionalGeneration:
    """With eyes for colors; with OLMoE unless another text model is named."""
    torch.manual_seed(7)
    config = tiny.llava_olmoe().config.to_dict()
    config["vision_config"]["num_channels"] = 3
    if text is not None:
        config["text_config"] = text.to_dict()
    return LlavaForConditionalGeneration(LlavaConfig(**config)).eval()


def dense_llava() -> LlavaForConditionalGeneration:
    text = LlamaConfig(
        vocab_size=tiny.WORDS,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=8,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    return llava(text)


def save_llava(folder: Path, template: str | None = TEMPLATE) -> LlavaForConditionalGeneration:
    model = llava()
    model.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    SiglipImageProcessor(image_mean=SEVERAL_SHADES, image_std=(0.3, 0.3, 0.2)).save_pretrained(folder)
    return model


def save_qwen(folder: Path):
    model = tiny_qwen.qwen()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    qwen_processor(10**6).save_pretrained(folder)
    return model


def qwen_processor(most_pixels: int) -> Qwen2VLImageProcessor:
    return Qwen2VLImageProcessor(
        size={"shortest_edge": 1, "longest_edge": most_pixels},
        patch_size=tiny_qwen.PATCH,
        merge_size=tiny_qwen.MERGE,
        image_mean=SEVERAL_SHADES,
        image_std=(0.3, 0.3, 0.2),
    )
