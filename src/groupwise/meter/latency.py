"""Milliseconds that a clock showed, and milliseconds that are only expected: two types, so they cannot be mixed up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VISION, PREFILL, DECODE = "vision", "prefill", "decode"
STAGES = (VISION, PREFILL, DECODE)
"""What an answer's time is made of, in order. n tokens take n - 1 decode steps."""


@dataclass(frozen=True)
class Measured:
    """One answer, timed."""

    stages_ms: Mapping[str, float]
    total_ms: float
    """From end to end, by one clock around everything: the stages need not add up to it exactly."""


@dataclass(frozen=True)
class Estimated:
    """One answer's expected time, not yet run."""

    stages_ms: Mapping[str, float]
    """Medians by stage."""
    total_ms: float
    """Median of the whole."""
    high_ms: float
    """What the whole stays under with the probability `quantile`."""
    quantile: float
