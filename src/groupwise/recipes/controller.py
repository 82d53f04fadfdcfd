"""The controller on the embedded mosaic model: a latency budget, four knobs, accuracy."""

from __future__ import annotations

from groupwise.core.config import AdvantageConfig, LossConfig, RewardConfig
from groupwise.training.config import Config, OptimizerConfig
from groupwise.workloads.controller.config import BudgetConfig, ControllerEvalConfig
from groupwise.workloads.controller.tasks.mosaic.config import MosaicConfig


def recipe() -> Config:
    return Config(
        MosaicConfig(
            BudgetConfig((0.62, 0.68, 0.74, 0.8, 0.86, 1.0), on_infeasible="cheapest"),
            # fewer than by default, so that training and evaluation take no more than minutes
            eval=ControllerEvalConfig(timed_answers=30, timed_answers_other_methods=8, prefilled_questions=500),
        ),
        steps=800,
        conditions_per_step=64,
        group_size=16,
        rows_per_pass=512,
        # With hard enforcement latency has no price: a small compute cost breaks ties, so that most groups have spread.
        reward=RewardConfig(weights={"compute_cost": 0.2}),
        advantage=AdvantageConfig(kind="centered"),
        loss=LossConfig(entropy=0.04, entropy_end=0.0),
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_updates=5),
    )
