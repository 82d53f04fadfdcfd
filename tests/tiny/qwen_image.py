"""A tiny Qwen-Image pipeline folder of the real classes with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2TokenizerFast


def byte_tokenizer() -> Qwen2TokenizerFast:
    """Each byte is a token."""
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    raw = Tokenizer(BPE(vocabulary, []))
    raw.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    return Qwen2TokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")


def save_tiny_qwen_image(folder: Path, **changes: Any) -> Path:
    """Latents of 4 channels at a quarter of the size; the released schedule, which ends at 0.02 before 0.

    `changes` are those of the transformer's sizes.
    """
    torch.manual_seed(6)
    sizes = {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": (4, 4, 8),
    }
    tokenizer = byte_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        time_shift_type="exponential",
        shift_terminal=0.02,
    )
    pipeline = QwenImagePipeline(
        scheduler=scheduler,
        vae=AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.0, 1.5, 2.0, 0.5],
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)),
        tokenizer=tokenizer,
        transformer=QwenImageTransformer2DModel(**{**sizes, **changes}),
    )
    pipeline.save_pretrained(folder)
    return folder
