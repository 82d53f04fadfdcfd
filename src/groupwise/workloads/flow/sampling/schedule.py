"""Noise levels of the denoising steps, and the window of steps that is sampled and trained. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from groupwise.core.errors import require, require_types

MAX_STEPS = 10_000
"""Denoising steps: more than the 1,000 that any scheduler distinguishes."""


@dataclass(frozen=True)
class WindowConfig:
    """Which steps are stochastic and trained. All other steps are deterministic."""

    kind: Literal["all", "first", "sliding"] = "sliding"
    """`all`: every step but the last. `first`: the first `share` of the steps. `sliding`: a few neighboring steps that
    change from training step to training step (Flow-GRPO-Fast, MixGRPO)."""
    share: float = 0.5
    """`first`: the share of the steps that is trained. `sliding`: the share that the window slides over."""
    size: int = 2
    """`sliding`: steps in the window, usually 1 or 2."""
    every: int = 1
    """`sliding`: training steps before the window slides on by one."""

    def __post_init__(self) -> None:
        require_types(self, "workload.sampling.window.")
        require(0 < self.share <= 1, "workload.sampling.window.share", self.share, "above 0, at most 1")
        require(self.size >= 1, "workload.sampling.window.size", self.size, "at least 1")
        require(self.every >= 1, "workload.sampling.window.every", self.every, "at least 1")


@dataclass(frozen=True)
class SamplingConfig:
    """How clips are sampled in rollouts."""

    num_inference_steps: int = 10
    """Denoising steps of a rollout."""
    shift: float | None = None
    """Values above 1 spend more steps at high noise levels: sigma -> shift sigma / (1 + (shift - 1) sigma), of levels
    from 1 to 0 in equal steps. None for the schedule of the pipeline."""
    stepper: Literal["flow_sde", "dance_sde", "cps", "cps_distance"] = "flow_sde"
    """How a step in the window is sampled. `cps_distance` samples as `cps` does and scores as its authors do, by minus
    the squared distance to the mean, which is no log-prob: their clip ranges (1e-5) are for it."""
    eta: float = 0.7
    """How much noise such a step adds: usually 0.7 for flow_sde, 0.3 for dance_sde, 0.8 for cps."""
    guidance_scale: float = 1.0
    """Classifier-free guidance, in sampling and in training; at 1 the model runs once per step instead of twice."""
    shared_noise: bool = True
    """Members of a group share their initial noise and the deterministic steps before the window, computed once."""
    latent_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the window's stored latents. They are rounded before they are scored, so the ratio is 1 either way."""
    window: WindowConfig = field(default_factory=WindowConfig)

    def __post_init__(self) -> None:
        require_types(self, "workload.sampling.")
        steps, window = self.num_inference_steps, self.window
        rule = f"from 2 to {MAX_STEPS:,}: the last step is never trained"
        require(2 <= steps <= MAX_STEPS, "workload.sampling.num_inference_steps", steps, rule)
        shift = 1.0 if self.shift is None else self.shift
        require(0 < shift < math.inf, "workload.sampling.shift", self.shift, "above 0, and finite")
        rule = "above 0, and finite: without noise there is nothing to compare"
        require(0 < self.eta < math.inf, "workload.sampling.eta", self.eta, rule)
        guidance = self.guidance_scale
        require(math.isfinite(guidance), "workload.sampling.guidance_scale", guidance, "a finite number")
        if self.stepper in ("cps", "cps_distance"):
            require(self.eta < 1, "workload.sampling.eta", self.eta, f"below 1 for {self.stepper}")
        if window.kind == "sliding":
            rule = f"at most {steps - 1}, because the last of sampling.num_inference_steps {steps} is not trained"
            require(window.size < steps, "workload.sampling.window.size", window.size, rule)
        require(
            len(window_at(self, 0)) >= 1, "workload.sampling.window.share", window.share, "large enough for one step"
        )


def noise_levels(config: SamplingConfig, steps: int | None = None) -> list[float]:
    """From 1 to 0, one more than there are steps: those of the config, or `steps`. Without a shift in equal steps."""
    steps, shift = steps or config.num_inference_steps, config.shift or 1.0
    uniform = [1 - step / steps for step in range(steps + 1)]
    return [shift * sigma / (1 + (shift - 1) * sigma) for sigma in uniform]


def window_at(config: SamplingConfig, training_step: int) -> range:
    """The denoising steps that a training step samples and trains.

    The last one never is: it ends at clean data, where cps adds no noise and the log-prob overflows.
    """
    window, trained = config.window, trained_steps(config)
    if window.kind != "sliding":
        return trained
    start = training_step // window.every % max(1, len(trained) - window.size + 1)
    return trained[start : start + window.size]


def trained_steps(config: SamplingConfig) -> range:
    """The denoising steps that some training step trains."""
    window, trainable = config.window, config.num_inference_steps - 1
    if window.kind == "all":
        return range(trainable)
    covered = round(window.share * config.num_inference_steps)
    least = window.size if window.kind == "sliding" else 0
    return range(min(trainable, max(covered, least)))
