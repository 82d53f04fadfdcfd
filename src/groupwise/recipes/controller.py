"""The controller on the embedded mosaic model: a latency budget, four knobs, accuracy."""

from __future__ import annotations

from groupwise.core.config import AdvantageConfig, LossConfig, RewardConfig
from groupwise.train.config import Config, OptimiserConfig
from groupwise.workloads.controller.mosaic.control import MosaicControllerConfig


def recipe() -> Config:
    return Config(
        MosaicControllerConfig(),
        steps=200,
        conditions_per_step=32,
        group_size=8,
        rows_per_pass=64,
        reward=RewardConfig(weights={"cost": 0.0}),  # within a guaranteed budget, time is free
        advantage=AdvantageConfig(kind="centred"),
        loss=LossConfig(entropy=0.01),
        optimiser=OptimiserConfig(learning_rate=1e-3, schedule="cosine", warmup_updates=5),
    )
