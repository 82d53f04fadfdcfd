"""Clips by Wan 2.1 or 2.2 from prompts, or from prompts and images, for 8 NPUs or GPUs, in groups of 8.

torchrun --nproc-per-node 8 -m groupwise train flow-wan --workload.pipeline FOLDER --workload.data FILE.jsonl \
  --workload.rewards.functions motion=http://127.0.0.1:8000/motion quality=mine:quality
"""

from __future__ import annotations

from groupwise.core.config import AdvantageConfig, LossConfig
from groupwise.training.config import Config, OptimizerConfig
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig
from groupwise.workloads.flow.tasks.pipelines import WanConfig


def recipe() -> Config:
    return Config(
        WanConfig(
            SamplingConfig(
                num_inference_steps=20,
                eta=0.7,
                guidance_scale=5.0,
                latent_dtype="bfloat16",
                window=WindowConfig("sliding", share=1.0, size=2),
            ),
            reference=True,
            frames=33,
            encode_rows=1,
            eval_rows=1,
            eval_steps=50,
        ),
        steps=500,
        conditions_per_step=8,
        group_size=8,
        rows_per_pass=2,  # 8 prompts x 8 members = 64 rollouts = 8 ranks x 4 passes x 2 rows; groups stay whole
        advantage=AdvantageConfig(clip=5.0),
        loss=LossConfig(clip_low=1e-3, clip_high=1e-3, kl=0.004),
        optimizer=OptimizerConfig(learning_rate=1e-4, ema_decay=0.95),
    )
