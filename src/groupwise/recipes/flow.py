"""The embedded camera-controlled video model on clips of three sprites on a floor: minutes on two cores."""

from __future__ import annotations

from groupwise.core.config import AdvantageConfig, LossConfig, RewardConfig
from groupwise.training.config import Config, OptimizerConfig
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig
from groupwise.workloads.flow.tasks.sprites.config import WEIGHTS, SpritesConfig


def recipe() -> Config:
    return Config(
        SpritesConfig(
            SamplingConfig(num_inference_steps=8, shift=10.0, eta=0.7, window=WindowConfig("first", share=0.5)),
            encode_rows=16,
            eval_rows=48,
        ),
        steps=72,
        conditions_per_step=8,
        group_size=8,
        rows_per_pass=64,
        reward=RewardConfig(weights=WEIGHTS),
        advantage=AdvantageConfig(clip=5.0),
        loss=LossConfig(clip_low=1e-3, clip_high=1e-3),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_updates=5, schedule="linear"),
    )
