"""Pace: how fast a machine answers at present, in terms of an estimator; it follows the answers that are measured.

The slowdown is an exponentially weighted mean of log(measured / estimated median). The bound is an adaptive conformal
quantile (Gibbs and Candes 2021): it rises after an answer that was late and falls a little after any other, so that the
share of late answers tends to 1 - quantile whatever the machine does. It moves with the slowdown, so that a change of
speed costs few late answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log

SLOWDOWN_RATE = 0.2
"""Weight of the newest answer in the slowdown: half of a change of speed is followed after 3 answers."""
BOUND_RATE = 0.04
"""How far the log of the bound moves at least. The share of late answers among n differs from the promised one by at
most the distance, in logs, that the bound had to go, over n times this. Where answers vary more it moves faster."""
_DEVIATION_RATE = 0.05
_LARGEST_STEP = 0.5
"""Of log(measured / estimated): a stall counts as an answer that is slower by two thirds. None is faster by chance."""


@dataclass(frozen=True)
class Pace:
    """Factors on an estimator's latencies."""

    slowdown: float = 1.0
    """On medians: 1.5 where answers take half as long again as when the estimator was fitted."""
    upper_ratio: float = 1.0
    """On upper quantiles: so much keeps the promised share of answers in time."""
    answers: int = 0
    """Measured answers, or batches, that it follows."""
    deviation: float = 0.0
    """How far the logs of measured / estimated medians are from the slowdown's, lately on average."""

    def after(self, measured_ms: float, *, median_ms: float, upper_ms: float, quantile: float) -> Pace:
        """The pace after one more answer, by its measured time and its estimates (without any pace)."""
        step = log(measured_ms / (self.slowdown * median_ms))
        change = exp(SLOWDOWN_RATE * min(step, _LARGEST_STEP))
        is_late = measured_ms > self.upper_ratio * upper_ms
        correction = exp(max(BOUND_RATE, self.deviation) * (quantile if is_late else quantile - 1))
        return Pace(
            slowdown=self.slowdown * change,
            upper_ratio=self.upper_ratio * change * correction,
            answers=self.answers + 1,
            deviation=self.deviation + _DEVIATION_RATE * (abs(step) - self.deviation),
        )


class BatchPaces:
    """The pace of single answers, and of batches in terms of the sum of their answers' estimates.

    Batches whose sizes lie between the same powers of two share a pace. It starts as that of single answers: as if
    nothing were shared in a batch.
    """

    def __init__(self) -> None:
        self._paces = {_size_class(1): Pace()}

    def of(self, batch_size: int) -> Pace:
        single = self._paces[_size_class(1)]
        return self._paces.get(_size_class(batch_size), replace(single, answers=0))

    def set(self, batch_size: int, pace: Pace) -> None:
        self._paces[_size_class(batch_size)] = pace


def _size_class(batch_size: int) -> int:
    """1 for single answers, 2 for batches of 2 and 3, 3 for 4 to 7, ..."""
    return batch_size.bit_length()
