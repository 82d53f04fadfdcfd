"""Whether a stored estimator still holds: a few answers measured now, beside what it estimates for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from groupwise.latency.busy import cpu_share, is_busy, undisturbed_ms
from groupwise.latency.estimator import LatencyEstimator
from groupwise.latency.regression import Observation, feature_columns, total_ms

TOLERANCE = 1.5
"""On the same machine the median CPU time of 40 answers was 0.8 to 1.3 times the estimate, with up to four other
programs on two cores (docs/latency.md): more is another speed."""
TOLERANCE_WHILE_BUSY = 3.0
"""Of CPU time above the estimate while other programs run: they also take the caches, from small models the most."""


@dataclass(frozen=True)
class SpeedCheck:
    """Medians over some answers."""

    answers: int
    estimated_ms: float
    measured_ms: float
    slowdown: float
    """Measured over estimated."""
    undisturbed_slowdown: float
    """The same without the time in which other programs ran, where that is known."""
    cpu_share: float | None
    threads: int = 1
    """CPU threads of an answer. The CPU time of several includes waiting for those that do not get the CPU."""

    @staticmethod
    def of(estimator: LatencyEstimator, observations: Sequence[Observation]) -> SpeedCheck:
        estimated, measured = estimator.predict_rows(feature_columns(observations)).total_ms, total_ms(observations)
        undisturbed = np.array([undisturbed_ms(row.measured) for row in observations])
        return SpeedCheck(
            answers=len(observations),
            estimated_ms=float(np.median(estimated)),
            measured_ms=float(np.median(measured)),
            slowdown=float(np.median(measured / estimated)),
            undisturbed_slowdown=float(np.median(undisturbed / estimated)),
            cpu_share=cpu_share([row.measured for row in observations]),
            threads=estimator.machine.threads,
        )

    @property
    def has_drifted(self) -> bool:
        """Whether the machine itself is clearly faster or slower than the estimator says, whatever else runs on it.
        Of several threads on a busy machine nobody can tell how much slower.
        """
        if not is_busy(self.cpu_share):
            return not within_tolerance(self.undisturbed_slowdown)
        most = TOLERANCE_WHILE_BUSY if self.threads == 1 else np.inf
        return not 1 / TOLERANCE <= self.undisturbed_slowdown <= most

    @property
    def is_disturbed(self) -> bool:
        """Whether answers are clearly slower, and other programs that run now can explain it."""
        return self.slowdown > TOLERANCE and not self.has_drifted

    def __str__(self) -> str:
        share = "" if self.cpu_share is None else f"; they had the CPU for {self.cpu_share:.0%} of the time"
        return (
            f"estimated {self.estimated_ms:.1f} ms, measured now {self.measured_ms:.1f} ms, {self.slowdown:.2f} times"
            f" as long (medians of {self.answers} answers{share})"
        )


def within_tolerance(slowdown: float) -> bool:
    return 1 / TOLERANCE <= slowdown <= TOLERANCE
