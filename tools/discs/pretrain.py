"""Pretraining of the embedded image model: flow matching on images whose captions are often wrong, resumable.

The batch of a step is a function of config and step alone, so a resumed run gives bit-identical weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.core.randomness import uniform
from groupwise.workloads.flow.models.base import Conditioning
from groupwise.workloads.flow.tasks.discs.config import LATENT_CHANNELS, LATENT_SIDE
from groupwise.workloads.flow.tasks.discs.model import conditioning_of, predict_clean
from groupwise.workloads.flow.tasks.discs.scene import COLORS, COUNTS, PLACES, WORDS, Latents, Meanings, draw_latents
from tools.pretraining import restore_pretraining_state, save_pretraining_state

_BATCH_KEY = 7  # of the random numbers that layouts do not use


@dataclass(frozen=True)
class PretrainConfig:
    seed: int = 30
    steps: int = 5400
    rows: int = 32
    """Images per step."""
    width: int = 96
    heads: int = 4
    blocks: int = 3
    learning_rate: float = 2e-3
    warmup: int = 100
    """Steps over which the learning rate rises; over the last third it falls to zero."""
    miscounted: float = 0.45
    """Share of the prompts that say one number less than the image shows (three for one disc)."""
    mirrored: float = 0.3
    """Share that say right for left, and bottom for top, or the other way round."""
    wrong_colors: float = 0.05
    """Share that say another color."""
    shift: float = 2.0
    """Of the noise levels: more of them are high, where it is settled what the image shows."""

    def learning_rate_at(self, step: int) -> float:
        rising, falling = (step + 1) / self.warmup, 3 * (self.steps - step) / self.steps
        return self.learning_rate * min(1.0, rising, falling)


@dataclass(frozen=True)
class ImageBatch:
    clean: Latents
    conditioning: Conditioning
    sigma: Float[Tensor, " rows"]
    noise: Latents


def draw_batch(config: PretrainConfig, step: int) -> ImageBatch:
    """The images of a step, with their prompts, of which some words are wrong."""
    numbers = step * config.rows + torch.arange(config.rows)
    uniforms = uniform(config.seed, _BATCH_KEY, numbers[:, None], 0, 0, torch.arange(7)).float()
    kinds = torch.tensor([len(COUNTS), len(COLORS), len(PLACES)])
    shown = (uniforms[:, :3] * kinds).long()
    said = _mistaken(shown, uniforms[:, 3:6] < torch.tensor([config.miscounted, config.wrong_colors, config.mirrored]))
    clean = draw_latents(config.seed, numbers, shown)
    sigma = config.shift * uniforms[:, 6] / (1 + (config.shift - 1) * uniforms[:, 6])
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    return ImageBatch(clean, conditioning_of(said), sigma, torch.randn(clean.shape, generator=generator))


def _mistaken(shown: Meanings, wrong: Bool[Tensor, "prompts 3"]) -> Meanings:
    """One number less, the color before, the opposite place, where they are wrong."""
    count, color, place = shown.unbind(1)
    others = torch.stack([(count - 1) % len(COUNTS), (color - 1) % len(COLORS), place ^ 1], dim=1)
    return torch.where(wrong, others, shown)


def build(config: PretrainConfig) -> SD3Transformer2DModel:
    """A fresh transformer."""
    torch.manual_seed(config.seed)
    return SD3Transformer2DModel(
        sample_size=LATENT_SIDE,
        patch_size=4,
        in_channels=LATENT_CHANNELS,
        num_layers=config.blocks,
        attention_head_dim=config.width // config.heads,
        num_attention_heads=config.heads,
        joint_attention_dim=len(WORDS),
        caption_projection_dim=config.width,
        pooled_projection_dim=len(WORDS),
        out_channels=LATENT_CHANNELS,
        pos_embed_max_size=LATENT_SIDE // 4,
        qk_norm="rms_norm",
    )


def denoising_loss(transformer: SD3Transformer2DModel, batch: ImageBatch) -> Tensor:
    """Squared error of the clean latents predicted from (1 - sigma) clean + sigma noise: flow matching x sigma^2."""
    sigma = batch.sigma.view(-1, 1, 1, 1)
    noisy = (1 - sigma) * batch.clean + sigma * batch.noise
    return (predict_clean(transformer, noisy, batch.sigma, batch.conditioning) - batch.clean).square().mean()


def pretrain(
    config: PretrainConfig,
    folder: Path,
    *,
    log: Callable[[str], None],
    stop_after: int | None = None,
    checkpoint_every: int = 200,
) -> SD3Transformer2DModel:
    """Train, resuming from the checkpoint in `folder` if there is one of the same config.

    `stop_after` ends the call early after that step, as a kill would.
    """
    transformer = build(config)
    optimizer = torch.optim.AdamW(transformer.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    first = restore_pretraining_state(folder, config, transformer, optimizer)
    last = config.steps if stop_after is None else min(stop_after, config.steps)
    started, losses = time.monotonic(), []
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        optimizer.zero_grad(set_to_none=True)
        loss = denoising_loss(transformer, draw_batch(config, step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            minutes = (time.monotonic() - started) / 60
            log(f"step {step + 1}/{config.steps}  {minutes:.1f} min  loss {sum(losses) / len(losses):.4f}")
            losses.clear()
        if (step + 1) % checkpoint_every == 0 or step + 1 == last:
            save_pretraining_state(folder, config, transformer, optimizer, step + 1)
    return transformer.eval()
