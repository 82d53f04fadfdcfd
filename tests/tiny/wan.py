"""A tiny Wan pipeline folder of the real classes with random weights, and what a test needs around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.models.camera_layers import add_camera_layers
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig
from groupwise.workloads.flow.tasks.pipelines import RecamConfig

LORA = TrainedPartsConfig(lora_rank=2, lora_alpha=4)
WORDS = ["<pad>", "</s>", "<unk>", "a", "cat", "dog", "by", "the", "sea", "blurry"]


def tiny_tokenizer(length: int) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )


def tiny_wan_transformer(**changes: Any) -> WanTransformer3DModel:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16, "out_channels": 16}
    sizes |= {"text_dim": 16, "freq_dim": 16, "ffn_dim": 24, "num_layers": 2, "rope_max_seq_len": 32}
    return WanTransformer3DModel(**{"patch_size": (1, 2, 2), **sizes, **changes})


def tiny_i2v_transformer(**changes: Any) -> WanTransformer3DModel:
    """For clips from an image, with the CLIP embedding of Wan 2.1."""
    width = changes.get("num_attention_heads", 2) * changes.get("attention_head_dim", 12)
    return tiny_wan_transformer(in_channels=36, image_dim=8, added_kv_proj_dim=width, **changes)


def tiny_wan_parts() -> dict[str, Any]:
    """All but the transformers: latents of 16 channels, a quarter of the frames (and one), an eighth of the size."""
    return {
        "tokenizer": tiny_tokenizer(512),
        "text_encoder": UMT5EncoderModel(
            UMT5Config(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        "vae": AutoencoderKLWan(
            base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
    }


def save_tiny_wan(folder: Path, **changes: Any) -> Path:
    """Text to video; `transformer_2` and `boundary_ratio` make it Wan 2.2."""
    torch.manual_seed(1)
    parts = {**tiny_wan_parts(), "transformer": tiny_wan_transformer(), **changes}
    WanPipeline(**parts).save_pretrained(folder)
    return folder


def save_tiny_wan_i2v(folder: Path, **changes: Any) -> Path:
    """Image to video, with the CLIP embedding of Wan 2.1."""
    torch.manual_seed(3)
    vision = CLIPVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    clip = {
        "image_encoder": CLIPVisionModel(vision),
        "image_processor": CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16),
        "transformer": tiny_i2v_transformer(),
    }
    WanImageToVideoPipeline(**{**tiny_wan_parts(), **clip, **changes}).save_pretrained(folder)
    return folder


def tiny_recam(folder: Path, conditions: Path, **settings: Any) -> RecamConfig:
    """The config of `flow-recam` for such a folder."""
    sampling = SamplingConfig(
        num_inference_steps=3,
        guidance_scale=2.0,
        latent_dtype="bfloat16",
        window=WindowConfig("sliding", 1.0, size=1),
    )
    defaults = {
        "pipeline": folder,
        "data": conditions,
        "rewards": RewardFunctionsConfig(functions=("warmth=workloads.flow.small:warmth",)),
        "train": LORA,
    }
    sizes = {"frames": 5, "height": 16, "width": 16, "dtype": "float32"}
    return RecamConfig(sampling, **{"reference": True, **defaults, **sizes, **settings})


def tiny_camera_transformer() -> WanTransformer3DModel:
    """For clips of pixels: one block of width 24, with random camera layers."""
    torch.manual_seed(5)
    transformer = WanTransformer3DModel(
        patch_size=(1, 4, 4),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=3,
        out_channels=3,
        text_dim=8,
        freq_dim=16,
        ffn_dim=24,
        num_layers=1,
        rope_max_seq_len=16,
    )
    add_camera_layers(transformer)
    for name, weight in transformer.named_parameters():
        if "processor" in name:
            torch.nn.init.normal_(weight, std=0.2)
    return transformer.eval()


def save_noise_clip(path: Path, frames: int, side: int = 16) -> Path:
    """A clip of noise, as bytes."""
    np.save(path, np.random.default_rng(frames).integers(0, 255, (frames, side, side, 3), dtype=np.uint8))
    return path
