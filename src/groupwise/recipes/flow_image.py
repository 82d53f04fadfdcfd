"""The embedded image model on prompts such as "two red discs left", with a judge beside the reward: minutes."""

from __future__ import annotations

from groupwise.core.config import AdvantageConfig, LossConfig, RewardConfig
from groupwise.training.config import Config, OptimizerConfig, RunConfig
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig
from groupwise.workloads.flow.tasks.discs.config import WEIGHTS, DiscsConfig


def recipe() -> Config:
    return Config(
        DiscsConfig(
            SamplingConfig(
                num_inference_steps=8,
                shift=3.0,
                eta=0.7,
                shared_noise=False,  # what an image shows is settled by its initial noise
                window=WindowConfig("first", share=0.625),
            ),
            encode_rows=64,
            eval_rows=48,
        ),
        steps=40,
        conditions_per_step=8,
        group_size=8,
        rows_per_pass=64,
        reward=RewardConfig(weights=WEIGHTS),
        advantage=AdvantageConfig(clip=5.0),
        loss=LossConfig(clip_low=1e-3, clip_high=1e-3),
        optimizer=OptimizerConfig(learning_rate=1.5e-3, warmup_updates=5),
        run=RunConfig(eval_every=10),
    )
