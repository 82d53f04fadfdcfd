"""RewardConfig, AdvantageConfig, LossConfig. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from groupwise.core.errors import require, require_types


@dataclass(frozen=True)
class RewardConfig:
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each named reward term; a term that is not named here weighs 1."""
    max_missing_fraction: float = 0.2
    """Share of a step's rollouts whose reward may be missing; above it the run stops. A failed reward is missing, not
    zero."""

    def __post_init__(self) -> None:
        require_types(self, "reward.")
        fraction = self.max_missing_fraction
        require(0 <= fraction <= 1, "reward.max_missing_fraction", fraction, "from 0 to 1")
        for name, weight in self.weights.items():
            require(math.isfinite(weight), f"reward.weights.{name}", weight, "a finite number")


@dataclass(frozen=True)
class AdvantageConfig:
    kind: Literal["group_std", "batch_std", "centered", "leave_one_out"] = "group_std"
    """Advantage of a rollout: (r - mean) / std of its group; the same with the std of the whole step; r - mean; or r -
    mean of the other members."""
    eps: float = 1e-6
    """Added to the std. Groups without spread are recognized by equal rewards, so it may be 0."""
    clip: float | None = None
    """Largest absolute advantage (flow models use 5); None for no limit."""

    def __post_init__(self) -> None:
        require_types(self, "advantage.")
        require(self.eps >= 0, "advantage.eps", self.eps, "0 or more")
        require(self.clip is None or self.clip > 0, "advantage.clip", self.clip, "above 0, or None")


@dataclass(frozen=True)
class LossConfig:
    kind: Literal["clipped", "policy_gradient", "ranking"] = "clipped"
    """Clipped ratio (PPO, GRPO); -advantage x log-probability; or -log sigmoid(logp_i - logp_j) over the pairs of a
    group in which i has the higher reward."""
    ratio: Literal["decision", "rollout"] = "decision"
    """One probability ratio per decision (GRPO), or their geometric mean per rollout (GSPO)."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high."""
    denominator: Literal["decisions", "rollouts", "constant"] = "decisions"
    """Mean over all decisions of the step (DAPO); over each rollout, then over rollouts (GRPO); or the sum divided by
    `constant` (Dr. GRPO)."""
    constant: float | None = None
    """Divisor with denominator 'constant': usually rollouts per step x longest rollout allowed."""
    kl: float = 0.0
    """Weight of the KL divergence from the reference policy (k3 estimator); 0 switches it off."""
    entropy: float = 0.0
    """Weight of the entropy bonus; 0 switches it off. It applies to the trained rows only."""
    entropy_end: float | None = None
    """Weight of the entropy bonus at the end of the run, reached linearly. None keeps it constant."""

    def __post_init__(self) -> None:
        require_types(self, "loss.")
        require(0 <= self.clip_low <= 1, "loss.clip_low", self.clip_low, "from 0 to 1")
        require(self.clip_high >= 0, "loss.clip_high", self.clip_high, "0 or more")
        constant_rule = "above 0 with loss.denominator 'constant', and None otherwise"
        given = self.constant is not None and self.constant > 0
        require(given == (self.denominator == "constant"), "loss.constant", self.constant, constant_rule)
        require(0 <= self.kl < math.inf, "loss.kl", self.kl, "0 or more")
        require(0 <= self.entropy < math.inf, "loss.entropy", self.entropy, "0 or more")
        falls = self.entropy_end is None or 0 <= self.entropy_end <= self.entropy
        require(falls, "loss.entropy_end", self.entropy_end, "from 0 to loss.entropy, or None")

    def entropy_at(self, progress: float) -> float:
        """The weight of the entropy bonus after this share of the steps."""
        end = self.entropy if self.entropy_end is None else self.entropy_end
        return self.entropy + (end - self.entropy) * min(1.0, progress)
