"""Latency records. Measured and estimated latency are two types, so that one cannot be taken for the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from groupwise.latency.busy import cpu_share

VISION, PREFILL, DECODE = "vision", "prefill", "decode"
STAGES = (VISION, PREFILL, DECODE)
"""The stages of an answer, in order. n tokens take n - 1 decode steps."""
QUEUE, IMAGE = "queue", "image"
"""What a served request spends besides: on waiting for other calls, and on opening and cutting its image."""


@dataclass(frozen=True)
class MeasuredLatency:
    """Measured latency of one answer."""

    stages_ms: Mapping[str, float]
    total_ms: float
    """End to end, by one clock around everything: the stages need not add up to it exactly."""
    cpu_ms: float | None = field(default=None, kw_only=True)
    """CPU time of the thread that asked; None where it is not known, or an accelerator does the work."""


@dataclass(frozen=True)
class EstimatedLatency:
    """Estimated latency of one answer, before it runs."""

    stages_ms: Mapping[str, float]
    """Median of each stage."""
    total_ms: float
    """Median of the total."""
    upper_ms: float
    """The total is below this with probability `quantile`."""
    quantile: float


@dataclass(frozen=True)
class Timing(MeasuredLatency):
    """Measured latency of one answer, with its decode steps one by one."""

    decode_steps_ms: tuple[float, ...] = ()
    """From the logits of each token to those of the next."""

    @property
    def decode_steps(self) -> int:
        return len(self.decode_steps_ms)


@dataclass(frozen=True)
class Quantiles:
    """Quantiles over runs, with linear interpolation."""

    p50_ms: float
    p95_ms: float
    iqr_ms: float
    """Interquartile range."""


@dataclass(frozen=True)
class LatencySummary:
    """Measured over `runs` runs. Medians of the stages need not add up to the median of the total."""

    stages: Mapping[str, Quantiles]
    total: Quantiles
    decode_step: Quantiles | None
    """Over all decode steps of all runs; None where answers have one token."""
    runs: int
    cpu_share: float | None = None
    """Of the time of all runs, the part in which they had the CPU; None where that is not known."""


def quantiles(values_ms: Sequence[float]) -> Quantiles:
    p25, p50, p75, p95 = (float(value) for value in np.quantile(values_ms, [0.25, 0.5, 0.75, 0.95]))
    return Quantiles(p50_ms=p50, p95_ms=p95, iqr_ms=p75 - p25)


def summarize(timings: Sequence[Timing]) -> LatencySummary:
    decode_steps = [step_ms for timing in timings for step_ms in timing.decode_steps_ms]
    return LatencySummary(
        stages={stage: quantiles([timing.stages_ms[stage] for timing in timings]) for stage in STAGES},
        total=quantiles([timing.total_ms for timing in timings]),
        decode_step=quantiles(decode_steps) if decode_steps else None,
        runs=len(timings),
        cpu_share=cpu_share(timings),
    )
