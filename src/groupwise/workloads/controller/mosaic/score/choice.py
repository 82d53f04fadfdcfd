"""What choosing the setting by kind of question is worth at a budget of time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from groupwise.core.errors import UserError
from groupwise.workloads.controller.mosaic.score.knobs import Setting

_UNIT_MS = 0.02


@dataclass(frozen=True)
class Choice:
    """The settings taken for each kind, and the mean time they take."""

    by_kind: tuple[Setting, ...]
    mean_ms: float


def best_single(accuracy: Mapping[Setting, np.ndarray], ms: Mapping[Setting, float], budget_ms: float) -> Choice:
    """Return the one setting within the budget that is right most often over all kinds."""
    fitting = [setting for setting in accuracy if ms[setting] <= budget_ms]
    best = max(fitting, key=lambda setting: accuracy[setting].mean())
    return Choice((best,) * len(accuracy[best]), ms[best])


def best_by_kind(accuracy: Mapping[Setting, np.ndarray], ms: Mapping[Setting, float], budget_ms: float) -> Choice:
    """Return the settings by kind that are right most often with a mean time within the budget.

    Kinds are equally frequent. Exact to _UNIT_MS, with times rounded up: a knapsack over the kinds.
    """
    settings = list(accuracy)
    kinds = len(accuracy[settings[0]])
    units = [int(np.ceil(ms[setting] / _UNIT_MS)) for setting in settings]
    capacity = int(budget_ms * kinds / _UNIT_MS)
    value = np.zeros(capacity + 1)
    taken = np.zeros((kinds, capacity + 1), np.int64)
    for kind in range(kinds):
        grown = np.full(capacity + 1, -np.inf)
        for number, (setting, cost) in enumerate(zip(settings, units, strict=True)):
            if cost > capacity:
                continue
            offered = np.full(capacity + 1, -np.inf)
            offered[cost:] = value[: capacity + 1 - cost] + accuracy[setting][kind]
            better = offered > grown
            grown[better], taken[kind, better] = offered[better], number
        value = grown
    if np.isinf(value[capacity]):
        raise UserError(f"No choice of settings takes {budget_ms} ms or less on average.")
    return _trace(settings, units, taken, capacity, ms)


def _trace(
    settings: Sequence[Setting], units: Sequence[int], taken: np.ndarray, capacity: int, ms: Mapping[Setting, float]
) -> Choice:
    chosen: list[Setting] = []
    left = capacity
    for kind in reversed(range(len(taken))):
        number = int(taken[kind, left])
        chosen.append(settings[number])
        left -= units[number]
    return Choice(tuple(reversed(chosen)), float(np.mean([ms[setting] for setting in chosen])))


def score(choice: Choice, accuracy: Mapping[Setting, np.ndarray]) -> float:
    """Return the share of right answers of this choice, over kinds equally."""
    return float(np.mean([accuracy[setting][kind] for kind, setting in enumerate(choice.by_kind)]))
