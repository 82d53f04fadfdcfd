"""Images by Qwen-Image, for 8 NPUs or GPUs: a LoRA adapter, in groups of 16.

torchrun --nproc-per-node 8 -m groupwise train flow-qwen-image --workload.pipeline FOLDER --workload.data FILE.jsonl \
  --workload.rewards.functions aesthetic=http://127.0.0.1:8000/aesthetic text=mine:text
"""

from __future__ import annotations

from groupwise.core.config import AdvantageConfig, LossConfig
from groupwise.training.config import Config, OptimizerConfig
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig
from groupwise.workloads.flow.tasks.pipelines import ImageConfig


def recipe() -> Config:
    return Config(
        ImageConfig(
            SamplingConfig(
                num_inference_steps=10,
                eta=1.2,
                guidance_scale=4.0,
                latent_dtype="bfloat16",
                window=WindowConfig("sliding", size=2),
            ),
            reference=True,
            eval_steps=50,
        ),
        steps=500,
        conditions_per_step=16,
        group_size=16,
        rows_per_pass=4,  # 16 prompts x 16 members = 256 rollouts = 8 ranks x 8 passes x 4 rows; groups stay whole
        advantage=AdvantageConfig(clip=5.0),
        loss=LossConfig(clip_low=1e-4, clip_high=1e-4, kl=0.01),
        optimizer=OptimizerConfig(learning_rate=1e-4, ema_decay=0.95),
    )
