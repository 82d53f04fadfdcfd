"""The embedded camera-controlled video model on clips of three sprites on a floor: minutes on two cores."""

from __future__ import annotations

from groupwise.core.config import AdvantageConfig, LossConfig, RewardConfig
from groupwise.training.config import Config, OptimizerConfig
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig
from groupwise.workloads.flow.tasks.sprites.config import WEIGHTS, SpritesConfig

_MAX_GRAD_NORM = 3e-5
"""Below all that occur, so that all have the same: the gradient of the window's last position is 7 times as large as
that of its first, and says no more."""


def recipe() -> Config:
    return Config(
        SpritesConfig(
            SamplingConfig(
                num_inference_steps=5, shift=3.0, eta=0.7, window=WindowConfig("sliding", share=1.0, size=1)
            ),
            encode_rows=16,
            eval_rows=48,
            eval_steps=8,
            train=TrainedPartsConfig(part="recam"),
        ),
        steps=240,
        conditions_per_step=16,
        group_size=16,
        rows_per_pass=64,
        reward=RewardConfig(weights=WEIGHTS),
        advantage=AdvantageConfig(clip=5.0),
        loss=LossConfig(clip_low=1e-3, clip_high=1e-3),
        optimizer=OptimizerConfig(
            learning_rate=3e-4, warmup_updates=5, schedule="linear", max_grad_norm=_MAX_GRAD_NORM
        ),
    )
