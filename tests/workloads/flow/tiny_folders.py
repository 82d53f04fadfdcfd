"""Pipeline folders of the real classes, with tiny random weights, as diffusers saves them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

WORDS = ["<pad>", "</s>", "<unk>", "a", "cat", "dog", "by", "the", "sea", "blurry"]


def tokenizer(length: int) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: nth for nth, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )


def wan_folder(folder: Path) -> Path:
    """Wan: latents of 16 channels, a quarter of the frames (and one), an eighth of the size."""
    torch.manual_seed(1)
    pipeline = WanPipeline(
        tokenizer=tokenizer(226),
        text_encoder=UMT5EncoderModel(
            UMT5Config(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        vae=AutoencoderKLWan(
            base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=16,
            freq_dim=16,
            ffn_dim=24,
            num_layers=2,
            rope_max_seq_len=32,
        ),
    )
    pipeline.save_pretrained(folder)
    return folder


def sd3_folder(folder: Path) -> Path:
    """Stable Diffusion 3: two CLIP encoders and a T5, latents of 4 channels at half the size."""
    torch.manual_seed(2)
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
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=16,
            pooled_projection_dim=16,
            out_channels=4,
            pos_embed_max_size=8,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(4, 4),
            latent_channels=4,
            norm_num_groups=2,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.06,
            scaling_factor=1.5,
        ),
        text_encoder=CLIPTextModelWithProjection(text),
        tokenizer=tokenizer(16),
        text_encoder_2=CLIPTextModelWithProjection(text),
        tokenizer_2=tokenizer(16),
        text_encoder_3=T5EncoderModel(t5),
        tokenizer_3=tokenizer(16),
    )
    pipeline.save_pretrained(folder)
    return folder


def clip_file(path: Path, frames: int, side: int = 16) -> Path:
    """A clip of noise, as bytes."""
    np.save(path, np.random.default_rng(frames).integers(0, 255, (frames, side, side, 3), dtype=np.uint8))
    return path
