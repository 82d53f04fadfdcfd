"""Methods compared: gains in accuracy under the same budget and at the same latency, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.workloads.controller.conditions import full_configuration
from groupwise.workloads.controller.evaluate.baselines import Scores, choose
from groupwise.workloads.controller.evaluate.exact import Choices, EvaluationSet

LATENCIES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "p50": lambda latency_ms: np.quantile(latency_ms, 0.5, axis=0),
    "p95": lambda latency_ms: np.quantile(latency_ms, 0.95, axis=0),
    "mean": lambda latency_ms: latency_ms.mean(axis=0),
}
"""What methods are compared at: a median says little of a method that answers half of the questions slowly."""
_LIMITS = 25
PerQuestion = Float[Tensor, " questions"]


@dataclass(frozen=True)
class PictureBootstrap:
    """Resamples pictures, with all their questions: questions about one picture are not independent."""

    pictures: Sequence[str]
    """Of each question."""
    draws: int = 2000
    seed: int = 0

    @cached_property
    def _picture(self) -> Int64[np.ndarray, " questions"]:
        return np.unique(np.array(self.pictures), return_inverse=True)[1]

    @cached_property
    def _times_drawn(self) -> Int64[np.ndarray, "draws pictures"]:
        pictures = int(self._picture.max()) + 1
        rng = np.random.default_rng(self.seed)
        return rng.multinomial(pictures, np.full(pictures, 1 / pictures), size=self.draws)

    def interval(self, values: PerQuestion) -> list[float]:
        """Of the mean over questions, 95 %; questions that are NaN are left out."""
        numbers, known = values.nan_to_num(0.0).numpy(), ~values.isnan().numpy()
        totals, counts = (
            self._times_drawn @ np.bincount(self._picture, weights, self._times_drawn.shape[1])
            for weights in (numbers, known)
        )
        means = totals[counts > 0] / counts[counts > 0]
        return [float(bound) for bound in np.quantile(means, [0.025, 0.975])]


def gain(
    controller: Float[Tensor, "questions budgets"], other: Float[Tensor, "questions budgets"], pictures: Sequence[str]
) -> dict[str, Any]:
    """How much more accurate the controller is: the mean over budgets, and under each."""
    difference, bootstrap = controller - other, PictureBootstrap(pictures)
    mean = difference.nanmean(1)
    return {
        "mean": float(mean.nanmean()),
        "interval": bootstrap.interval(mean),
        "by_budget": difference.nanmean(0).tolist(),
        "intervals_by_budget": [bootstrap.interval(column) for column in difference.T],
    }


@dataclass(frozen=True)
class Curve:
    """A method under rising limits: its accuracy, and its latency on each question."""

    accuracy: Float[Tensor, "questions limits"]
    latency_ms: Float[Tensor, "questions limits"]

    def points(self, latency: str) -> tuple[np.ndarray, np.ndarray]:
        """Mean accuracy by latency, as `LATENCIES` names it."""
        return LATENCIES[latency](self.latency_ms.numpy()), self.accuracy.nanmean(0).numpy()

    def accuracy_at(self, latency_ms: float, latency: str) -> PerQuestion:
        """Each question's accuracy, interpolated between the two limits around this latency.

        A limit that is slower and less accurate than another is passed over, though that is known in hindsight only:
        the method is not blamed for it. Beyond its slowest and its fastest limit it is what it is there.
        """
        times, means = self.points(latency)
        order = np.lexsort((-means, times))
        best = np.maximum.accumulate(means[order])
        efficient = order[np.concatenate([[True], best[1:] > best[:-1]])]
        position = float(np.interp(latency_ms, times[efficient], np.arange(len(efficient))))
        below, share = int(position), position - int(position)
        above = min(below + 1, len(efficient) - 1)
        return (1 - share) * self.accuracy[:, efficient[below]] + share * self.accuracy[:, efficient[above]]


class LatencyOnTestQuestions:
    """What answers to all test questions take, from those that were timed: the estimate times a measured pace."""

    def __init__(self, test_set: EvaluationSet, paces: Sequence[float], seed: int = 0):
        """`paces`: measured over estimated, of answers with fixed knobs. Each question gets one of them at random, the
        same for all methods."""
        drawn = np.random.default_rng(seed).choice(np.array(paces), len(test_set.questions))
        self._test_set, self._pace = test_set, torch.from_numpy(drawn)[:, None]

    def curve(self, choices: Choices, own_ms: float) -> Curve:
        latency_ms = self._test_set.median_ms.gather(1, choices) * self._pace + own_ms
        return Curve(self._test_set.accuracy_of(choices), latency_ms)


def rising_limits(test_set: EvaluationSet) -> Float[Tensor, "questions limits"]:
    """From the cheapest configuration of each question to the full one."""
    conditions = test_set.conditions
    full = full_configuration(conditions.upper_ms)[conditions.table_index]
    cheapest = test_set.upper_ms.amin(1)
    return cheapest[:, None] + torch.linspace(0, 1, _LIMITS, dtype=full.dtype) * (full - cheapest)[:, None]


def choices_under_limits(scores: Scores, test_set: EvaluationSet, extra_ms: float) -> Choices:
    return choose(scores, test_set, extra_ms, rising_limits(test_set))


def at_equal_latency(
    controller: Curve, others: Mapping[str, Curve], pictures: Sequence[str], latency: str
) -> dict[str, Any]:
    """The controller under its budgets, and what other methods reach at the same latency.

    `mean` is the area between the two curves over the controller's range: the mean difference at its points.
    """
    times, _ = controller.points(latency)
    rows: dict[str, Any] = {
        "controller": {"latency_ms": times.tolist(), "accuracy": controller.accuracy.nanmean(0).tolist()}
    }
    for name, curve in others.items():
        reached = torch.stack([curve.accuracy_at(float(time), latency) for time in times], dim=1)
        limits_ms, accuracy = curve.points(latency)
        rows[name] = {
            "accuracy": reached.nanmean(0).tolist(),
            **gain(controller.accuracy, reached, pictures),
            "curve": {"latency_ms": limits_ms.tolist(), "accuracy": accuracy.tolist()},
        }
    return rows
