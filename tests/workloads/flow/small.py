"""A flow task small enough to reason about: a tiny random Wan transformer with camera layers, and a reward by hand."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

import groupwise as gw
from groupwise.rewards.call import RewardFunction
from groupwise.workloads.flow.config import FlowConfig
from groupwise.workloads.flow.models.camera_layers import add_camera_layers
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig
from groupwise.workloads.flow.task import FlowTask
from groupwise.workloads.flow.tasks.plane.model import PlaneModel
from groupwise.workloads.flow.tasks.plane.task import plane_conditions

CPU = torch.device("cpu")


def transformer() -> WanTransformer3DModel:
    """One block of width 24, with camera layers that do something."""
    torch.manual_seed(5)
    found = WanTransformer3DModel(
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
    add_camera_layers(found)
    for name, weight in found.named_parameters():
        if "processor" in name:
            torch.nn.init.normal_(weight, std=0.2)
    return found.eval()


def warmth(prompts: list[str], completions: list[Tensor], **_: Any) -> list[float]:
    """The redder a clip is than blue, the better."""
    return [float(clip[0].mean() - clip[2].mean()) for clip in completions]


def steadiness(prompts: list[str], completions: list[Tensor], cameras: list[Tensor], **_: Any) -> list[float]:
    """Small changes between frames, measured by how far the camera goes."""
    moves = [1 + camera[-1, 3::4].norm() for camera in cameras]
    return [-float(clip.diff(dim=1).abs().mean() / move) for clip, move in zip(completions, moves, strict=True)]


def slowly(reward: RewardFunction, seconds: float) -> RewardFunction:
    def judged(*words: Any, **columns: Any) -> Any:
        time.sleep(seconds)
        return reward(*words, **columns)

    return judged


@dataclass(frozen=True)
class SmallConfig(FlowConfig):
    sampling: SamplingConfig = field(
        default_factory=lambda: SamplingConfig(steps=4, window=WindowConfig("moving", 1.0))
    )
    reward_s: float = 0.0
    """What the judge takes for a step, so that a run can be killed in it."""
    step_rewards: bool = False
    """Judge the warmth that is expected after each step, too."""

    def task(self, device: torch.device) -> FlowTask:
        return FlowTask(
            model=PlaneModel(transformer().to(device)),
            conditions=plane_conditions(torch.arange(16)),
            held_out=plane_conditions(torch.arange(100, 104)),
            rewards={"warmth": slowly(warmth, self.reward_s), "steadiness": steadiness},
            step_rewards={"expected warmth": warmth} if self.step_rewards else {},
            weights={"warmth": 1.0, "steadiness": 1.0},
        )


def recipe() -> gw.Config:
    return gw.Config(
        SmallConfig(reference=True),
        steps=4,
        conditions_per_step=4,
        group_size=4,
        rows_per_pass=4,
        loss=gw.LossConfig(clip_low=1e-3, clip_high=1e-3, kl=0.01),
        optimizer=gw.OptimizerConfig(learning_rate=3e-3, ema_decay=0.5),
        run=gw.RunConfig(checkpoint_every=2),
    )


def slow_recipe() -> gw.Config:
    """Ten steps of which each waits for its judge."""
    config, run = recipe(), gw.RunConfig(checkpoint_every=2, preflight=False)
    return replace(config, workload=SmallConfig(reference=True, reward_s=0.1), steps=10, run=run)
