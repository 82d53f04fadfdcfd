"""Groupwise: GRPO for anything that makes a sequence of decisions.

Public names are imported on first use, so that `import groupwise` and `groupwise --help` do not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.core.config import AdvantageConfig, LossConfig, RewardConfig
    from groupwise.core.errors import UserError
    from groupwise.core.groups import group_id
    from groupwise.core.placement import RolloutRows, place
    from groupwise.core.shape import StepShape
    from groupwise.core.types import RewardTerms, Rollouts, Scores
    from groupwise.rewards.call import call_rewards
    from groupwise.training.config import Config, OptimizerConfig, RunConfig
    from groupwise.training.run import train
    from groupwise.workloads.base import Reporter, Workload, WorkloadConfig
    from groupwise.workloads.controller.serving.adaptive import AdaptiveModel

__version__ = "0.1.0"

_MODULE_OF = {
    "AdaptiveModel": "workloads.controller.serving.adaptive",
    "AdvantageConfig": "core.config",
    "Config": "training.config",
    "LossConfig": "core.config",
    "OptimizerConfig": "training.config",
    "Reporter": "workloads.base",
    "RewardConfig": "core.config",
    "Rollouts": "core.types",
    "RolloutRows": "core.placement",
    "RunConfig": "training.config",
    "Scores": "core.types",
    "StepShape": "core.shape",
    "RewardTerms": "core.types",
    "UserError": "core.errors",
    "Workload": "workloads.base",
    "WorkloadConfig": "workloads.base",
    "group_id": "core.groups",
    "call_rewards": "rewards.call",
    "place": "core.placement",
    "train": "training.run",
}

__all__ = [
    "AdaptiveModel",
    "AdvantageConfig",
    "Config",
    "LossConfig",
    "OptimizerConfig",
    "Reporter",
    "RewardConfig",
    "RewardTerms",
    "RolloutRows",
    "Rollouts",
    "RunConfig",
    "Scores",
    "StepShape",
    "UserError",
    "Workload",
    "WorkloadConfig",
    "call_rewards",
    "group_id",
    "place",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"groupwise.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'groupwise' has no attribute '{name}'")
