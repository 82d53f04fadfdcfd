"""Groupwise: GRPO for anything that makes a row of decisions.

Names are loaded when first used, so that `import groupwise` and `groupwise --help` do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.core.config import AdvantageConfig, LossConfig, RewardConfig
    from groupwise.core.errors import UserError
    from groupwise.core.groups import group_id
    from groupwise.core.placement import Rows, place
    from groupwise.core.shape import Shape
    from groupwise.core.types import Rollouts, Scored, Terms
    from groupwise.rewards.call import judge
    from groupwise.training.config import Config, OptimiserConfig, RunConfig
    from groupwise.training.run import train
    from groupwise.workloads.base import Workload, WorkloadConfig
    from groupwise.workloads.controller.serving.adaptive import AdaptiveModel

__version__ = "0.1.0"

_HOME = {
    "AdaptiveModel": "workloads.controller.serving.adaptive",
    "AdvantageConfig": "core.config",
    "Config": "training.config",
    "LossConfig": "core.config",
    "OptimiserConfig": "training.config",
    "RewardConfig": "core.config",
    "Rollouts": "core.types",
    "Rows": "core.placement",
    "RunConfig": "training.config",
    "Scored": "core.types",
    "Shape": "core.shape",
    "Terms": "core.types",
    "UserError": "core.errors",
    "Workload": "workloads.base",
    "WorkloadConfig": "workloads.base",
    "group_id": "core.groups",
    "judge": "rewards.call",
    "place": "core.placement",
    "train": "training.run",
}

__all__ = [
    "AdaptiveModel",
    "AdvantageConfig",
    "Config",
    "LossConfig",
    "OptimiserConfig",
    "RewardConfig",
    "Rollouts",
    "Rows",
    "RunConfig",
    "Scored",
    "Shape",
    "Terms",
    "UserError",
    "Workload",
    "WorkloadConfig",
    "group_id",
    "judge",
    "place",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"groupwise.{_HOME[name]}"), name)
    raise AttributeError(f"module 'groupwise' has no attribute '{name}'")
