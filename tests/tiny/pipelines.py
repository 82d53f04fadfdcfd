"""Tiny pipeline folders by name, and the config that trains each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig
from groupwise.workloads.flow.tasks.pipelines import ImageConfig, PipelineConfig, WanConfig
from tiny.flux import save_tiny_flux
from tiny.qwen_image import save_tiny_qwen_image
from tiny.sd3 import save_tiny_sd3
from tiny.wan import LORA, save_tiny_wan, save_tiny_wan_i2v, tiny_i2v_transformer, tiny_wan_transformer

STEPS = 3
PIPELINES: dict[str, Callable[..., Path]] = {
    "sd3": save_tiny_sd3,
    "flux-dev": save_tiny_flux,
    "flux-schnell": lambda folder: save_tiny_flux(folder, guidance_embeds=False),
    "qwen-image": save_tiny_qwen_image,
    "wan-2.1": lambda folder, **sizes: save_tiny_wan(folder, transformer=tiny_wan_transformer(**sizes)),
    "wan-2.2": lambda folder, **sizes: save_tiny_wan(
        folder,
        transformer=tiny_wan_transformer(**sizes),
        transformer_2=tiny_wan_transformer(**sizes),
        boundary_ratio=0.875,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=12.0),
    ),
    "wan-2.2-5b": lambda folder, **sizes: save_tiny_wan(
        folder, transformer=tiny_wan_transformer(**sizes), expand_timesteps=True
    ),
    "wan-2.1-i2v": lambda folder, **sizes: save_tiny_wan_i2v(folder, transformer=tiny_i2v_transformer(**sizes)),
    "wan-2.2-i2v": lambda folder, **sizes: save_tiny_wan_i2v(
        folder,
        image_encoder=None,
        image_processor=None,
        transformer=tiny_wan_transformer(in_channels=36, **sizes),
        transformer_2=tiny_wan_transformer(in_channels=36, **sizes),
        boundary_ratio=0.9,
    ),
}


def save_pipeline(name: str, folder: Path, **sizes: Any) -> Path:
    """The pipeline, an image beside it, and rows that name it; with other sizes of its transformers."""
    torch.manual_seed(8)
    PIPELINES[name](folder / "pipeline", **sizes)
    pixels = np.random.default_rng(3).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    rows = [{"prompt": prompt, "video": "image.png"} for prompt in ("a cat", "a dog by the sea")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(folder: Path, name: str, **changes: Any) -> PipelineConfig:
    sampling = SamplingConfig(
        num_inference_steps=STEPS, guidance_scale=3.0, window=WindowConfig("sliding", 1.0, size=1)
    )
    settings = {
        "pipeline": folder / "pipeline",
        "data": folder / "rows.jsonl",
        "rewards": RewardFunctionsConfig(functions=("warmth=workloads.flow.small:warmth",)),
        "train": LORA,
        "height": 16,
        "width": 16,
        "dtype": "float32",
        "negative_prompt": "blurry",
    }
    if name.startswith("wan"):
        return WanConfig(sampling, **{**settings, "frames": 5, "low_noise_guidance_scale": 2.0, **changes})
    return ImageConfig(sampling, **{**settings, **changes})
