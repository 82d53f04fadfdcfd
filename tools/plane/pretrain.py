"""What a pretraining run depends on, and the clips of each of its steps.
Flow matching on filmed clips; any step can be left and taken up again, and the weights come out the same.
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
from groupwise.workloads.flow.models.camera_layers import add_camera_layers, camera_velocity
from groupwise.workloads.flow.tasks.plane.scene import (
    COLOURS,
    FRAMES,
    LARGEST,
    LIGHT_LEVELS,
    WORDS,
    brightness,
    draw_motions,
    draw_scenes,
    encode,
    path_of,
    render_clip,
)
from tools.pretraining import restore_pretraining_state, save_pretraining_state

_DRAWS = 7  # keys of random numbers that are a step's own


@dataclass(frozen=True)
class PretrainConfig:
    seed: int = 20
    steps: int = 900
    rows: int = 32
    width: int = 64
    heads: int = 2
    blocks: int = 3
    hidden: int = 192
    learning_rate: float = 2e-3
    warmup: int = 50
    cosine: int = 4000
    """Steps over which the learning rate would fall to zero by itself."""
    decay: int = 400
    """Last steps, over which it falls to zero indeed."""
    drift: float = 0.2
    """Poses given with the clips are wrong, as those estimated from real videos are: by this share of the largest
    motion (std), growing along the path. So the model knows where about the camera goes, not exactly where."""
    prompt_dropped: float = 0.1
    """Share of clips without a prompt, for guidance."""

    def rate(self, step: int) -> float:
        """Warm-up, the beginning of a cosine, then straight to zero."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        slow = (1 + math.cos(math.pi * (step - self.warmup) / (self.cosine - self.warmup))) / 2
        return self.learning_rate * slow * min(1.0, (self.steps - step) / self.decay)


@dataclass(frozen=True)
class ClipBatch:
    clip: Float[Tensor, "rows colors frames side side"]
    source: Float[Tensor, "rows colors frames side side"]
    camera: Float[Tensor, "rows frames 12"]
    """As given with the clip: not quite where it was taken from."""
    text: Float[Tensor, "rows words width"]
    sigma: Float[Tensor, " rows"]
    noise: Float[Tensor, "rows colors frames side side"]


def draw_batch(plan: PretrainConfig, step: int) -> ClipBatch:
    """The clips of a step, a function of the plan and the step alone."""
    numbers = step * plan.rows + torch.arange(plan.rows)
    scenes, motions = draw_scenes(plan.seed, numbers), draw_motions(plan.seed, numbers)
    drift = (
        plan.drift * torch.tensor(LARGEST) * normal(plan.seed, _DRAWS, numbers[:, None], 0, 0, torch.arange(6)).float()
    )
    label = motions + drift[:, None] * torch.linspace(0, 1, FRAMES)[None, :, None]
    chance = uniform(plan.seed, _DRAWS, numbers[:, None], 0, 1, torch.arange(3)).float()
    lights = list(LIGHT_LEVELS)
    prompts = [lights[int(len(lights) * number)] for number in chance[:, 0].tolist()]
    silent = chance[:, 1] < plan.prompt_dropped
    told = ["" if quiet else prompt for prompt, quiet in zip(prompts, silent.tolist(), strict=True)]
    clip = render_clip(scenes, path_of(motions)) * brightness(prompts).view(-1, 1, 1, 1, 1)
    elements = torch.arange(clip[0].numel())
    noise = normal(plan.seed, _DRAWS, numbers[:, None], 0, 2, elements).float().view_as(clip)
    source = render_clip(scenes, path_of(draw_motions(plan.seed, numbers, own=True)))
    sigma = chance[:, 2].sqrt()  # more of the high levels, where the clip has to be made up from what is known
    return ClipBatch(clip, source, path_of(label), encode(told), sigma, noise)


_GATES = [2, 5]  # of the rows of a block's scale_shift_table


def build(plan: PretrainConfig) -> WanTransformer3DModel:
    """A fresh transformer with camera layers.

    There is no base model whose behaviour must be kept, so nothing begins shut: poses are heard from the first step,
    and attention and feed-forward layers begin open.
    """
    torch.manual_seed(plan.seed)
    transformer = WanTransformer3DModel(
        patch_size=(1, 4, 4),
        num_attention_heads=plan.heads,
        attention_head_dim=plan.width // plan.heads,
        in_channels=COLOURS,
        out_channels=COLOURS,
        text_dim=len(WORDS),
        freq_dim=64,
        ffn_dim=plan.hidden,
        num_layers=plan.blocks,
        rope_max_seq_len=32,
    )
    add_camera_layers(transformer)
    with torch.no_grad():
        for block in transformer.blocks:
            block.attn1.processor.pose_encoder.weight.normal_()
            block.scale_shift_table[:, _GATES] = 1.0
    return transformer


def loss_of(transformer: WanTransformer3DModel, plan: PretrainConfig, step: int) -> torch.Tensor:
    """Squared error of the velocity noise - clip at x = (1 - sigma) clip + sigma noise."""
    batch = draw_batch(plan, step)
    sigma = batch.sigma.view(-1, 1, 1, 1, 1)
    noisy = (1 - sigma) * batch.clip + sigma * batch.noise
    velocity = camera_velocity(transformer, noisy, 1000 * batch.sigma, batch.text, batch.source, batch.camera)
    return (velocity - (batch.noise - batch.clip)).square().mean()


def pretrain(
    plan: PretrainConfig,
    folder: Path,
    *,
    say: Callable[[str], None],
    stop_after: int | None = None,
    checkpoint_every: int = 100,
) -> WanTransformer3DModel:
    """Train as planned, going on from the checkpoint in `folder` if there is one of the same plan.

    `stop_after` ends the call early at that step, as a kill would.
    """
    transformer = build(plan)
    optimizer = torch.optim.AdamW(transformer.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    first = restore_pretraining_state(folder, plan, transformer, optimizer)
    last = plan.steps if stop_after is None else min(stop_after, plan.steps)
    started, losses = time.monotonic(), []
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate(step)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(transformer, plan, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            minutes = (time.monotonic() - started) / 60
            say(f"step {step + 1}/{plan.steps}  {minutes:.1f} min  loss {sum(losses) / len(losses):.4f}")
            losses.clear()
        if (step + 1) % checkpoint_every == 0 or step + 1 == last:
            save_pretraining_state(folder, plan, transformer, optimizer, step + 1)
    return transformer.eval()
