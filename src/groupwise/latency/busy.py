"""Whether other programs took time from an answer while it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from groupwise.latency.records import MeasuredLatency

MIN_CPU_SHARE = 0.9
"""Of a quiet machine: below it answers take at least a tenth longer than they would."""


def cpu_share(answers: Sequence[MeasuredLatency]) -> float | None:
    """CPU time over elapsed time of all answers together; None where some answer's CPU time is not known."""
    cpu_ms = [answer.cpu_ms for answer in answers if answer.cpu_ms is not None]
    if not answers or len(cpu_ms) < len(answers):
        return None
    return sum(cpu_ms) / sum(answer.total_ms for answer in answers)


def is_busy(share: float | None) -> bool:
    """Whether a machine was busy with other programs; False where the share is not known."""
    return share is not None and share < MIN_CPU_SHARE


def undisturbed_ms(answer: MeasuredLatency) -> float:
    """Without the time in which other programs ran, where it is known."""
    return answer.total_ms if answer.cpu_ms is None else answer.cpu_ms
