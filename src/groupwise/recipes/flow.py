"""The embedded camera-controlled video model on clips of textured planes: minutes on two cores."""

from __future__ import annotations

from groupwise.core.config import AdvantageConfig, LossConfig, RewardConfig
from groupwise.training.config import Config, OptimizerConfig
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig
from groupwise.workloads.flow.tasks.plane.config import WEIGHTS, PlaneConfig


def recipe() -> Config:
    return Config(
        PlaneConfig(SamplingConfig(num_inference_steps=6, eta=0.7, window=WindowConfig("sliding", share=0.67, size=2))),
        steps=60,
        conditions_per_step=8,
        group_size=8,
        rows_per_pass=32,
        reward=RewardConfig(weights=WEIGHTS),
        advantage=AdvantageConfig(clip=5.0),
        loss=LossConfig(clip_low=1e-3, clip_high=1e-3),
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_updates=5),
    )
