"""A tiny Flux.1 pipeline folder of the real classes with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from tiny.wan import WORDS, tiny_tokenizer


def save_tiny_flux(folder: Path, **changes: Any) -> Path:
    """Latents of 4 channels at half the size; the schedule depends on the size, as in the released pipelines.

    `changes` are those of the transformer's sizes.
    """
    torch.manual_seed(4)
    sizes = {
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 8,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 4, 8),
    }
    text = CLIPTextConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=tiny_image_vae(),
        text_encoder=CLIPTextModel(text),
        tokenizer=tiny_tokenizer(16),
        text_encoder_2=T5EncoderModel(
            T5Config(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        tokenizer_2=tiny_tokenizer(512),
        transformer=FluxTransformer2DModel(**{**sizes, **changes}),
    )
    pipeline.save_pretrained(folder)
    return folder


def tiny_image_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4),
        latent_channels=4,
        norm_num_groups=2,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.5,
    )
