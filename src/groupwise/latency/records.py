"""Milliseconds that a clock showed, and milliseconds that are only expected: two types, so they cannot be mixed up.
One answer's timing, and many of them in three numbers a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

VISION, PREFILL, DECODE = "vision", "prefill", "decode"
STAGES = (VISION, PREFILL, DECODE)
"""What an answer's time is made of, in order. n tokens take n - 1 decode steps."""


@dataclass(frozen=True)
class MeasuredLatency:
    """One answer, timed."""

    stages_ms: Mapping[str, float]
    total_ms: float
    """From end to end, by one clock around everything: the stages need not add up to it exactly."""


@dataclass(frozen=True)
class EstimatedLatency:
    """One answer's expected time, not yet run."""

    stages_ms: Mapping[str, float]
    """Medians by stage."""
    total_ms: float
    """Median of the whole."""
    high_ms: float
    """What the whole stays under with the probability `quantile`."""
    quantile: float


@dataclass(frozen=True)
class Timing(MeasuredLatency):
    """One answer, timed, with its decode steps one by one."""

    steps_ms: tuple[float, ...] = ()
    """From each token's scores to the next one's."""
    parts_ms: Mapping[str, float] = field(default_factory=dict)
    """Time inside each part that was called; empty unless the meter was asked for detail."""

    @property
    def decode_steps(self) -> int:
        return len(self.steps_ms)


@dataclass(frozen=True)
class Quantiles:
    """Of some milliseconds, with straight lines between neighbours."""

    p50_ms: float
    p95_ms: float
    spread_ms: float
    """Interquartile range: the middle half of the runs lies this close together."""


@dataclass(frozen=True)
class LatencySummary:
    """Measured over `runs` runs. Medians of stages need not add up to the median of the whole."""

    stages: Mapping[str, Quantiles]
    total: Quantiles
    decode_step: Quantiles | None
    """Over all steps of all runs; None where answers are of one token."""
    runs: int


def quantiles(values_ms: Sequence[float]) -> Quantiles:
    low, middle, high, highest = (float(value) for value in np.quantile(values_ms, [0.25, 0.5, 0.75, 0.95]))
    return Quantiles(p50_ms=middle, p95_ms=highest, spread_ms=high - low)


def summarize(timings: Sequence[Timing]) -> LatencySummary:
    steps = [step for timing in timings for step in timing.steps_ms]
    return LatencySummary(
        stages={stage: quantiles([timing.stages_ms[stage] for timing in timings]) for stage in STAGES},
        total=quantiles([timing.total_ms for timing in timings]),
        decode_step=quantiles(steps) if steps else None,
        runs=len(timings),
    )
