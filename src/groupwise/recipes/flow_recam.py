"""ReCamMaster's task on Wan, for 8 NPUs or GPUs: clips along another camera path, in groups of 4.

torchrun --nproc-per-node 8 -m groupwise train flow-recam --workload.pipeline FOLDER --workload.data FILE.jsonl \
  --workload.camera-layers FILE.safetensors \
  --workload.rewards.functions camera=http://127.0.0.1:8000/camera quality=mine:quality
"""

from __future__ import annotations

from groupwise.core.config import AdvantageConfig, LossConfig, RewardConfig
from groupwise.training.config import Config, OptimizerConfig
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig
from groupwise.workloads.flow.tasks.pipelines import RecamConfig


def recipe() -> Config:
    return Config(
        RecamConfig(
            SamplingConfig(
                num_inference_steps=20,
                shift=5.0,
                eta=0.7,
                guidance_scale=5.0,
                latent_dtype="bfloat16",
                window=WindowConfig("sliding", size=2),
            ),
            reference=True,
            encode_rows=1,
            eval_rows=2,
        ),
        steps=500,
        conditions_per_step=8,
        group_size=4,
        rows_per_pass=2,  # 8 conditions x 4 members = 32 rollouts = 8 ranks x 2 passes x 2 rows
        reward=RewardConfig(weights={"camera": 0.6, "quality": 0.4}),
        advantage=AdvantageConfig(clip=5.0),
        loss=LossConfig(clip_low=1e-4, clip_high=1e-4, kl=0.01),
        optimizer=OptimizerConfig(learning_rate=1e-4, ema_decay=0.95),
    )
