"""A tiny Stable Diffusion 3 pipeline folder of the real classes with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig
from groupwise.workloads.flow.tasks.pipelines import ImageConfig
from tiny.flux import tiny_image_vae
from tiny.wan import LORA, WORDS, tiny_tokenizer


def save_tiny_sd3(folder: Path, **changes: Any) -> Path:
    """A pipeline with two CLIP encoders and a T5, latents of 4 channels at half the size.

    `changes` are those of the transformer's sizes.
    """
    torch.manual_seed(2)
    sizes = {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 16,
        "out_channels": 4,
        "pos_embed_max_size": 8,
    }
    text = CLIPTextConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=8,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    t5 = T5Config(vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    pipeline = StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(**{**sizes, **changes}),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=tiny_image_vae(),
        text_encoder=CLIPTextModelWithProjection(text),
        tokenizer=tiny_tokenizer(16),
        text_encoder_2=CLIPTextModelWithProjection(text),
        tokenizer_2=tiny_tokenizer(16),
        text_encoder_3=T5EncoderModel(t5),
        tokenizer_3=tiny_tokenizer(256),
    )
    pipeline.save_pretrained(folder)
    return folder


def tiny_sd3(folder: Path, **settings: Any) -> ImageConfig:
    """The config of `flow-sd3` for a folder with such a pipeline and prompts.jsonl."""
    sampling = SamplingConfig(num_inference_steps=3, guidance_scale=3.0, window=WindowConfig("sliding", 1.0, size=1))
    defaults = {"pipeline": folder / "pipeline", "data": folder / "prompts.jsonl", "train": LORA, "reference": True}
    sizes = {"height": 16, "width": 16, "dtype": "float32"}
    return ImageConfig(
        sampling,
        rewards=RewardFunctionsConfig(functions=("warmth=workloads.flow.small:warmth",)),
        **{**defaults, **sizes, **settings},
    )
