"""Pretraining of the embedded flow model: flow matching on rendered clips, resumable at any step.

The batch of a step is a function of config and step alone, so a resumed run gives bit-identical weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from jaxtyping import Float
from torch import Tensor

from groupwise.core.randomness import normal, uniform
from groupwise.workloads.flow.cameras import motion_to_pose
from groupwise.workloads.flow.models.camera_layers import add_camera_layers, camera_velocity
from groupwise.workloads.flow.tasks.plane.config import COLORS, FRAMES
from groupwise.workloads.flow.tasks.plane.scene import (
    LIGHT_LEVELS,
    MAX_MOTION,
    WORDS,
    brightness,
    draw_motions,
    draw_scenes,
    encode_prompts,
    render_clip,
)
from tools.pretraining import restore_pretraining_state, save_pretraining_state

_BATCH_KEY = 7  # of the random numbers that scenes and motions do not use
_GATES = [2, 5]  # rows of a block's scale_shift_table


@dataclass(frozen=True)
class PretrainConfig:
    seed: int = 20
    steps: int = 900
    rows: int = 32
    """Clips per step."""
    width: int = 64
    heads: int = 2
    blocks: int = 3
    hidden: int = 192
    """Width of the feed-forward layers."""
    learning_rate: float = 2e-3
    warmup: int = 50
    """Steps over which the learning rate rises."""
    cosine: int = 4000
    """Steps after which the cosine schedule would reach zero."""
    decay: int = 400
    """Last steps, over which the learning rate falls linearly to zero."""
    drift: float = 0.2
    """Error of the poses given with the clips, as in poses estimated from real videos: std as a share of the maximum
    motion, growing along the path. So the model learns roughly where the camera goes, not exactly."""
    prompt_dropped: float = 0.1
    """Share of clips without a prompt, for guidance."""

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, the beginning of a cosine, then linear decay to zero."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        slow = (1 + math.cos(math.pi * (step - self.warmup) / (self.cosine - self.warmup))) / 2
        return self.learning_rate * slow * min(1.0, (self.steps - step) / self.decay)


@dataclass(frozen=True)
class ClipBatch:
    clip: Float[Tensor, "rows colors frames side side"]
    source: Float[Tensor, "rows colors frames side side"]
    camera: Float[Tensor, "rows frames 12"]
    """As given to the model: with `drift`, not quite the poses that the clip was rendered from."""
    text: Float[Tensor, "rows words vocabulary"]
    sigma: Float[Tensor, " rows"]
    noise: Float[Tensor, "rows colors frames side side"]


def draw_batch(config: PretrainConfig, step: int) -> ClipBatch:
    """The clips of a step."""
    numbers = step * config.rows + torch.arange(config.rows)
    keys = (config.seed, _BATCH_KEY, numbers[:, None], 0)
    scenes, motions = draw_scenes(config.seed, numbers), draw_motions(config.seed, numbers)
    drift = config.drift * torch.tensor(MAX_MOTION) * normal(*keys, 0, torch.arange(6)).float()
    given_motions = motions + drift[:, None] * torch.linspace(0, 1, FRAMES)[None, :, None]
    uniforms = uniform(*keys, 1, torch.arange(3)).float()
    lights = list(LIGHT_LEVELS)
    prompts = [lights[int(len(lights) * number)] for number in uniforms[:, 0].tolist()]
    dropped = (uniforms[:, 1] < config.prompt_dropped).tolist()
    text = encode_prompts(["" if drop else prompt for prompt, drop in zip(prompts, dropped, strict=True)])
    clip = render_clip(scenes, motion_to_pose(motions)) * brightness(prompts)
    noise = normal(*keys, 2, torch.arange(clip[0].numel())).float().view_as(clip)
    source = render_clip(scenes, motion_to_pose(draw_motions(config.seed, numbers, of_source=True)))
    sigma = uniforms[:, 2].sqrt()  # more high noise levels, where the clip must be made from the conditioning
    return ClipBatch(clip, source, motion_to_pose(given_motions), text, sigma, noise)


def build(config: PretrainConfig) -> WanTransformer3DModel:
    """A fresh transformer with camera layers.

    There is no base model to preserve, so no layer starts at zero: pose encoders are random, and the gates of attention
    and feed-forward layers are open.
    """
    torch.manual_seed(config.seed)
    transformer = WanTransformer3DModel(
        patch_size=(1, 4, 4),
        num_attention_heads=config.heads,
        attention_head_dim=config.width // config.heads,
        in_channels=COLORS,
        out_channels=COLORS,
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


def flow_matching_loss(transformer: WanTransformer3DModel, config: PretrainConfig, step: int) -> Tensor:
    """Squared error of the velocity noise - clip at x = (1 - sigma) clip + sigma noise."""
    batch = draw_batch(config, step)
    sigma = batch.sigma.view(-1, 1, 1, 1, 1)
    noisy = (1 - sigma) * batch.clip + sigma * batch.noise
    velocity = camera_velocity(transformer, noisy, 1000 * batch.sigma, batch.text, batch.source, batch.camera)
    return (velocity - (batch.noise - batch.clip)).square().mean()


def pretrain(
    config: PretrainConfig,
    folder: Path,
    *,
    log: Callable[[str], None],
    stop_after: int | None = None,
    checkpoint_every: int = 100,
) -> WanTransformer3DModel:
    """Train, resuming from the checkpoint in `folder` if there is one of the same config.

    `stop_after` ends the call early after that step, as a kill would.
    """
    transformer = build(config)
    optimizer = torch.optim.AdamW(transformer.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    first = restore_pretraining_state(folder, config, transformer, optimizer)
    last = config.steps if stop_after is None else min(stop_after, config.steps)
    started, losses = time.monotonic(), []
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        optimizer.zero_grad(set_to_none=True)
        loss = flow_matching_loss(transformer, config, step)
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
