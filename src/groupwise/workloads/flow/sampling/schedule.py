"""Noise levels of the denoising steps, and which of the steps are stochastic and trained. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from groupwise.core.errors import require, require_types


@dataclass(frozen=True)
class WindowConfig:
    kind: Literal["all", "first", "moving"] = "moving"
    """Which steps are drawn at random and trained: all but the last; the first `share` of them; or a few neighbouring
    ones that change from training step to training step (Flow-GRPO-Fast, MixGRPO). All others are deterministic."""
    share: float = 0.5
    """`first`: the share of the steps that is trained. `moving`: the share of the steps that the window moves over."""
    size: int = 2
    """`moving`: steps in the window, 1 or 2 usually."""
    every: int = 1
    """`moving`: training steps that the window stays before it moves on by one."""

    def __post_init__(self) -> None:
        require_types(self, "workload.sampling.window.")
        require(0 < self.share <= 1, "workload.sampling.window.share", self.share, "above 0, at most 1")
        require(self.size >= 1, "workload.sampling.window.size", self.size, "at least 1")
        require(self.every >= 1, "workload.sampling.window.every", self.every, "at least 1")


@dataclass(frozen=True)
class SamplingConfig:
    steps: int = 10
    """Denoising steps of a rollout."""
    shift: float = 1.0
    """Above 1 more steps are spent where there is much noise: sigma -> shift sigma / (1 + (shift - 1) sigma)."""
    stepper: Literal["flow_sde", "dance_sde", "cps"] = "flow_sde"
    """How a step in the window is drawn."""
    eta: float = 0.7
    """How much noise it adds: 0.7 is usual for flow_sde, 0.3 for dance_sde, 0.8 for cps."""
    guidance: float = 1.0
    """Classifier-free guidance, in sampling and training alike; 1 asks the model once instead of twice."""
    branch: bool = True
    """Members of a group share their first noise and the deterministic steps before the window, computed once."""
    storage: Literal["float32", "bfloat16"] = "float32"
    """In which the window's latents are kept. They are rounded before they are scored, so the ratio is 1 either way."""
    window: WindowConfig = field(default_factory=WindowConfig)

    def __post_init__(self) -> None:
        require_types(self, "workload.sampling.")
        require(self.steps >= 2, "workload.sampling.steps", self.steps, "at least 2: the last step is never trained")
        require(self.shift > 0, "workload.sampling.shift", self.shift, "above 0")
        require(self.eta > 0, "workload.sampling.eta", self.eta, "above 0: without noise there is nothing to compare")
        if self.stepper == "cps":
            require(self.eta < 1, "workload.sampling.eta", self.eta, "below 1 for cps")
        window = len(window_at(self, 0))
        rule = f"at most {self.steps - 1}, because the last of sampling.steps {self.steps} is not trained"
        require(
            self.window.kind != "moving" or self.window.size < self.steps,
            "workload.sampling.window.size",
            self.window.size,
            rule,
        )
        require(window >= 1, "workload.sampling.window.share", self.window.share, "large enough for one step")


def noise_levels(config: SamplingConfig) -> list[float]:
    """From 1 to 0, one more than there are steps."""
    plain = [1 - nth / config.steps for nth in range(config.steps + 1)]
    return [config.shift * sigma / (1 + (config.shift - 1) * sigma) for sigma in plain]


def window_at(config: SamplingConfig, step: int) -> range:
    """The denoising steps that training step `step` draws and trains. The last one never is: its log p overflows."""
    window, trainable = config.window, config.steps - 1
    if window.kind == "all":
        return range(trainable)
    covered = min(trainable, round(window.share * config.steps))
    if window.kind == "first":
        return range(covered)
    places = max(1, covered - window.size + 1)
    start = step // window.every % places
    return range(start, min(start + window.size, trainable))


def pairs(levels: Sequence[float], steps: range) -> list[tuple[float, float]]:
    return [(levels[nth], levels[nth + 1]) for nth in steps]
