"""Chat on the embedded model and task: sums in a dialogue; the reward is 1 for the right number."""

from __future__ import annotations

from groupwise.training.config import Config, OptimizerConfig, RunConfig
from groupwise.workloads.chat.config import ChatConfig, DataConfig, PolicyConfig, SamplingParams

_TASK = "groupwise.workloads.chat.tasks.arithmetic"


def recipe() -> Config:
    return Config(
        ChatConfig(
            policy=PolicyConfig(model=f"{_TASK}:asset"),
            data=DataConfig(train=f"{_TASK}.task:train_rows", held_out=f"{_TASK}.task:held_out_rows"),
            sampling=SamplingParams(max_new_tokens=64),
        ),
        steps=60,
        conditions_per_step=16,
        group_size=8,
        rows_per_pass=128,
        optimizer=OptimizerConfig(learning_rate=3e-4, schedule="linear", warmup_updates=3),
        run=RunConfig(samples_per_step=8, show_samples_every=30),
    )
