"""Chat on the embedded arithmetic model, minutes on two cores. The reward is 1 for the correct number."""

from __future__ import annotations

from groupwise.training.config import Config, OptimizerConfig, RunConfig
from groupwise.workloads.chat.config import ChatConfig, SamplingParams


def recipe() -> Config:
    return Config(
        ChatConfig(sampling=SamplingParams(max_new_tokens=64)),
        steps=60,
        conditions_per_step=16,
        group_size=8,
        rows_per_pass=128,
        optimizer=OptimizerConfig(learning_rate=3e-4, schedule="linear", warmup_updates=3),
        run=RunConfig(samples_per_step=8, show_samples_every=30),
    )
