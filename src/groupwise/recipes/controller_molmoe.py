"""The controller on MolmoE-1B, or another model with experts, and VQA from disk; for 8 accelerators.

torchrun --nproc-per-node 8 -m groupwise train controller-molmoe --workload.model FOLDER --workload.questions FILE
"""

from __future__ import annotations

from pathlib import Path

from groupwise.core.config import AdvantageConfig, LossConfig, RewardConfig
from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.training.config import Config, OptimizerConfig
from groupwise.workloads.controller.config import ControllerEvalConfig
from groupwise.workloads.controller.tasks.vqa.config import VqaConfig


def recipe() -> Config:
    return Config(
        VqaConfig(
            rewards=RewardFunctionsConfig(functions=("vqa",)),
            answers=Path("runs/controller-molmoe-answers.db"),
            eval=ControllerEvalConfig(imitation_steps=0),
        ),
        steps=500,
        conditions_per_step=64,
        group_size=8,
        rows_per_pass=64,  # 64 conditions x 8 members = 8 ranks x 1 pass
        reward=RewardConfig(weights={"compute_cost": 0.0}),
        advantage=AdvantageConfig(kind="centered"),
        loss=LossConfig(entropy=0.01),
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_updates=5),
    )
