"""Flow matching on filmed clips; any step can be left and taken up again, and the weights come out the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel

from groupwise.workloads.flow.models.camera_layers import add_camera_layers, camera_velocity
from groupwise.workloads.flow.plane.pretrain.plan import Plan, draw_batch
from groupwise.workloads.flow.plane.scene import COLOURS
from groupwise.workloads.flow.plane.words import WORDS
from groupwise.workloads.pretraining import save_progress, take_up

_GATES = [2, 5]  # of the rows of a block's scale_shift_table


def build(plan: Plan) -> WanTransformer3DModel:
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


def loss_of(transformer: WanTransformer3DModel, plan: Plan, step: int) -> torch.Tensor:
    """Squared error of the velocity noise - clip at x = (1 - sigma) clip + sigma noise."""
    batch = draw_batch(plan, step)
    sigma = batch.sigma.view(-1, 1, 1, 1, 1)
    noisy = (1 - sigma) * batch.clip + sigma * batch.noise
    velocity = camera_velocity(transformer, noisy, 1000 * batch.sigma, batch.text, batch.source, batch.camera)
    return (velocity - (batch.noise - batch.clip)).square().mean()


def pretrain(
    plan: Plan,
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
    optimiser = torch.optim.AdamW(transformer.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    first = take_up(folder, plan, transformer, optimiser)
    last = plan.steps if stop_after is None else min(stop_after, plan.steps)
    started, losses = time.monotonic(), []
    for step in range(first, last):
        for group in optimiser.param_groups:
            group["lr"] = plan.rate(step)
        optimiser.zero_grad(set_to_none=True)
        loss = loss_of(transformer, plan, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            minutes = (time.monotonic() - started) / 60
            say(f"step {step + 1}/{plan.steps}  {minutes:.1f} min  loss {sum(losses) / len(losses):.4f}")
            losses.clear()
        if (step + 1) % checkpoint_every == 0 or step + 1 == last:
            save_progress(folder, plan, transformer, optimiser, step + 1)
    return transformer.eval()
