"""A flow task small enough to reason about: a tiny random Wan transformer with camera layers, rewards by hand."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tiny.pixel_clips import PixelClipModel, pixel_conditions
from tiny.wan import tiny_camera_transformer
from torch import Tensor

import groupwise as gw
from groupwise.rewards.call import RewardFunction
from groupwise.workloads.flow.config import FlowConfig
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig
from groupwise.workloads.flow.sampling.steppers import Transition
from groupwise.workloads.flow.task import FlowTask

CPU = torch.device("cpu")


def warmth(prompts: list[str], completions: list[Tensor], **_: Any) -> list[float]:
    """How much redder than blue a clip is."""
    return [float(clip[0].mean() - clip[2].mean()) for clip in completions]


def steadiness(prompts: list[str], completions: list[Tensor], cameras: list[Tensor], **_: Any) -> list[float]:
    """Minus the changes between frames, relative to the distance that the camera moves."""
    moves = [1 + camera[-1, 3::4].norm() for camera in cameras]
    return [-float(clip.diff(dim=1).abs().mean() / move) for clip, move in zip(completions, moves, strict=True)]


def slowly(reward: RewardFunction, seconds: float) -> RewardFunction:
    def slow_reward(*arguments: Any, **columns: Any) -> Any:
        time.sleep(seconds)
        return reward(*arguments, **columns)

    return slow_reward


def residual_chi2(following: Tensor, transition: Transition) -> Tensor:
    """Mean squared standardized residual: near 1 where the latents were sampled from this very transition."""
    std = transition.std.view(-1, *[1] * (following.ndim - 1))
    return (((following - transition.mean) / std) ** 2).flatten(1).mean(1)


@dataclass(frozen=True)
class SmallConfig(FlowConfig):
    sampling: SamplingConfig = field(
        default_factory=lambda: SamplingConfig(num_inference_steps=4, window=WindowConfig("sliding", 1.0))
    )
    reward_s: float = 0.0
    """Seconds that a reward takes, so that a run can be killed in it."""
    step_rewards: bool = False
    """Reward the warmth that is predicted after each step, too."""

    def task(self, device: torch.device) -> FlowTask:
        return FlowTask(
            model=PixelClipModel(tiny_camera_transformer().to(device)),
            conditions=pixel_conditions(torch.arange(16)),
            held_out=pixel_conditions(torch.arange(100, 104)),
            rewards={"warmth": slowly(warmth, self.reward_s), "steadiness": steadiness},
            step_rewards={"predicted warmth": warmth} if self.step_rewards else {},
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
    """Ten steps, each of which waits for its reward."""
    config, run = recipe(), gw.RunConfig(checkpoint_every=2, preflight=False)
    return replace(config, workload=SmallConfig(reference=True, reward_s=0.1), steps=10, run=run)
