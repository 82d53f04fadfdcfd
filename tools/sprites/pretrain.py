"""Pretraining of the embedded flow model: flow matching on clips in closed form, resumable at any step.

First clips whose camera paths are labeled exactly. Then two models go on from the same weights, optimizer state and
scenes: `base` with labels of which half belong to another clip; `upper` with exact labels.
The batch of a step is a function of config and step alone, so a resumed run gives bit-identical weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from diffusers import WanTransformer3DModel
from jaxtyping import Float
from torch import Tensor

from groupwise.core.randomness import uniform
from groupwise.workloads.flow.data.cameras import motion_to_pose
from groupwise.workloads.flow.models.base import Conditioning
from groupwise.workloads.flow.models.camera_layers import add_camera_layers
from groupwise.workloads.flow.tasks.sprites.config import LATENT_CHANNELS
from groupwise.workloads.flow.tasks.sprites.latents import Latents, encode_source, latents_of, source_pictures
from groupwise.workloads.flow.tasks.sprites.model import predict_clean
from groupwise.workloads.flow.tasks.sprites.scene import (
    LIGHT_LEVELS,
    WORDS,
    draw_motions,
    draw_scenes,
    encode_prompts,
    light_levels,
)
from tools.pretraining import restore_pretraining_state, save_pretraining_state

_BATCH_KEY = 7  # of the random numbers that scenes and motions do not use
_UNRELATED = 1  # added to the seed: paths of other clips than the labeled one
_GATES = [2, 5]  # rows of a block's scale_shift_table

Stage = Literal["shared", "base", "upper"]


@dataclass(frozen=True)
class PretrainConfig:
    seed: int = 20
    shared_steps: int = 1300
    """Steps with exact labels, which both models share."""
    own_steps: int = 700
    """Steps after that of each model, over which the learning rate falls linearly to zero."""
    rows: int = 32
    """Clips per step."""
    width: int = 128
    heads: int = 4
    blocks: int = 4
    hidden: int = 384
    """Width of the feed-forward layers."""
    learning_rate: float = 1.5e-3
    warmup: int = 50
    """Steps over which the learning rate rises."""
    mislabeled: float = 0.5
    """Share of the base model's own clips whose label is the camera path of another clip."""
    prompt_dropped: float = 0.1
    """Share of clips without a prompt, for guidance."""
    shift: float = 4.0
    """Of the noise levels: most are high, where the clip must be made from the conditioning."""

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, constant, then linear decay to zero."""
        rising = min(1.0, (step + 1) / self.warmup)
        return self.learning_rate * rising * min(1.0, (self.shared_steps + self.own_steps - step) / self.own_steps)


@dataclass(frozen=True)
class ClipBatch:
    clean: Latents
    conditioning: Conditioning
    """Its camera is what the label says, which is not the path that a mislabeled clip shows."""
    sigma: Float[Tensor, " rows"]
    noise: Latents


def draw_batch(config: PretrainConfig, step: int, *, exact: bool) -> ClipBatch:
    """The clips of a step; their scenes, lights and noise are the same with exact labels and without."""
    numbers = step * config.rows + torch.arange(config.rows)
    scenes, motions = draw_scenes(config.seed, numbers), draw_motions(config.seed, numbers)
    uniforms = uniform(config.seed, _BATCH_KEY, numbers[:, None], 0, 0, torch.arange(4)).float()
    shown = motions if exact else _mislabel(config, numbers, motions, uniforms[:, 0])
    lights = list(LIGHT_LEVELS)
    prompts = [lights[int(len(lights) * number)] for number in uniforms[:, 1].tolist()]
    dropped = (uniforms[:, 2] < config.prompt_dropped).tolist()
    clean = latents_of(scenes, motion_to_pose(shown), light_levels(prompts))
    conditioning = {
        "text": encode_prompts(["" if drop else prompt for prompt, drop in zip(prompts, dropped, strict=True)]),
        "source": encode_source(source_pictures(scenes)),
        "camera": motion_to_pose(motions),
    }
    sigma = config.shift * uniforms[:, 3] / (1 + (config.shift - 1) * uniforms[:, 3])
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    return ClipBatch(clean, conditioning, sigma, torch.randn(clean.shape, generator=generator))


def _mislabel(
    config: PretrainConfig, numbers: Tensor, labels: Float[Tensor, "rows frames 6"], uniforms: Float[Tensor, " rows"]
) -> Float[Tensor, "rows frames 6"]:
    """The paths that clips with these labels show: their own, or one that has nothing to do with the label."""
    unrelated = draw_motions(config.seed + _UNRELATED, numbers)
    return torch.where((uniforms < config.mislabeled).view(-1, 1, 1), unrelated, labels)


def build(config: PretrainConfig) -> WanTransformer3DModel:
    """A fresh transformer with camera layers.

    There is no base model to preserve, so no layer starts at zero: pose encoders are random, and the gates of attention
    and feed-forward layers are open.
    """
    torch.manual_seed(config.seed)
    transformer = WanTransformer3DModel(
        patch_size=(1, 6, 6),
        num_attention_heads=config.heads,
        attention_head_dim=config.width // config.heads,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=len(WORDS),
        freq_dim=64,
        ffn_dim=config.hidden,
        num_layers=config.blocks,
        rope_max_seq_len=32,
    )
    add_camera_layers(transformer)
    with torch.no_grad():
        for block in transformer.blocks:
            block.attn1.processor.pose_encoder.weight.normal_()
            block.scale_shift_table[:, _GATES] = 1.0
    return transformer


def denoising_loss(transformer: WanTransformer3DModel, batch: ClipBatch) -> Tensor:
    """Squared error of the clean latents predicted from (1 - sigma) clean + sigma noise: flow matching x sigma^2."""
    sigma = batch.sigma.view(-1, 1, 1, 1, 1)
    noisy = (1 - sigma) * batch.clean + sigma * batch.noise
    return (predict_clean(transformer, noisy, batch.sigma, batch.conditioning) - batch.clean).square().mean()


def pretrain(
    config: PretrainConfig,
    folder: Path,
    stage: Stage,
    *,
    log: Callable[[str], None],
    stop_after: int | None = None,
    checkpoint_every: int = 100,
) -> WanTransformer3DModel:
    """Train a stage, resuming from its checkpoint in `folder` if there is one of the same config.

    `base` and `upper` continue from the checkpoint of `shared`. `stop_after` ends the call early after that step, as a
    kill would.
    """
    transformer = build(config)
    optimizer = torch.optim.AdamW(transformer.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    first = restore_pretraining_state(folder / stage, config, transformer, optimizer)
    if not first and stage != "shared":
        first = restore_pretraining_state(folder / "shared", config, transformer, optimizer)
    stage_end = config.shared_steps + (0 if stage == "shared" else config.own_steps)
    last = stage_end if stop_after is None else min(stop_after, stage_end)
    started, losses = time.monotonic(), []
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        optimizer.zero_grad(set_to_none=True)
        loss = denoising_loss(transformer, draw_batch(config, step, exact=stage != "base"))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            minutes = (time.monotonic() - started) / 60
            log(f"{stage}: step {step + 1}/{stage_end}  {minutes:.1f} min  loss {sum(losses) / len(losses):.4f}")
            losses.clear()
        if (step + 1) % checkpoint_every == 0 or step + 1 == last:
            save_pretraining_state(folder / stage, config, transformer, optimizer, step + 1)
    return transformer.eval()
