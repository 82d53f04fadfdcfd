"""Measure the model over the whole grid of settings, and lay the results out as Markdown tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from groupwise.workloads.controller.knobs import Knobs
from groupwise.workloads.controller.mosaic.crops import Tier
from groupwise.workloads.controller.mosaic.questions import KINDS
from groupwise.workloads.controller.mosaic.remembered import Remembered
from groupwise.workloads.controller.mosaic.score.choice import best_by_kind, best_single, score
from groupwise.workloads.controller.mosaic.score.knobs import CHEAPEST, FULL, GRID, SINGLE_KNOBS, Setting
from groupwise.workloads.controller.mosaic.words import decode
from groupwise.workloads.controller.task import Question

Accuracy = dict[Setting, np.ndarray]


@dataclass(frozen=True)
class Measured:
    """Shares of right answers by kind on two splits, and batch-1 milliseconds by way of answering."""

    validation: Accuracy
    test: Accuracy
    ms: Mapping[str, Mapping[Setting, float]]

    def as_records(self) -> list[dict[str, object]]:
        """Return one flat record for each setting, to be written as JSON."""
        return [
            {
                "tier": setting.tier.value,
                "blocks": setting.blocks,
                "top_k": setting.top_k,
                "validation": _by_name(self.validation[setting]),
                "test": _by_name(self.test[setting]),
                "batch1_ms": {name: round(times[setting], 2) for name, times in self.ms.items() if setting in times},
            }
            for setting in self.test
        ]


def _by_name(shares: np.ndarray) -> dict[str, float]:
    return {kind.value: round(float(share), 4) for kind, share in zip(KINDS, shares, strict=True)}


def remembered_accuracy(questions: Sequence[Question], remembered: Remembered) -> Accuracy:
    """Return the share of right answers by kind for each setting of the grid, from the table of answers."""
    kinds = np.array([question.kind for question in questions])
    found: Accuracy = {}
    for setting in GRID:
        knobs = Knobs(setting.tier.value, 1, setting.top_k, setting.blocks)
        right = np.array([_is_right(question, remembered, knobs) for question in questions])
        found[setting] = np.array([right[kinds == kind.value].mean() for kind in KINDS])
    return found


def _is_right(question: Question, remembered: Remembered, knobs: Knobs) -> bool:
    tokens = remembered.one(question.sample.name, knobs)
    assert tokens is not None, "the table holds every question of its parts"
    return decode(list(tokens)) in question.answers


def knob_table(measured: Measured, way: str) -> str:
    """Return accuracy and time of full, cheapest, and each knob alone."""
    named = {"full": FULL, **{f"{knob} alone": s for knob, s in SINGLE_KNOBS.items()}, "cheapest": CHEAPEST}
    ms = measured.ms[way]
    rows = [
        [
            name,
            str(setting),
            f"{measured.test[setting].mean():.3f}",
            f"{(measured.test[setting].mean() - measured.test[FULL].mean()) * 100:+.1f}",
            f"{ms[setting]:.1f}",
            f"{ms[setting] / ms[FULL]:.2f}",
        ]
        for name, setting in named.items()
    ]
    return _markdown(["", "setting", "right", "points", "ms", "of full"], rows)


def kind_table(accuracy: Accuracy) -> str:
    """Return accuracy by kind of question for settings from full to cheapest."""
    shown = [FULL, Setting(Tier.MEDIUM, FULL.blocks, FULL.top_k), *SINGLE_KNOBS.values(), CHEAPEST]
    rows = [[str(s), *(f"{share:.2f}" for share in accuracy[s]), f"{accuracy[s].mean():.3f}"] for s in shown]
    return _markdown(["setting", *KINDS, "all"], rows)


def grid_table(accuracy: Accuracy, tier: Tier) -> str:
    """Return accuracy over blocks and top-k at one tier."""
    blocks = sorted({setting.blocks for setting in accuracy}, reverse=True)
    top_ks = sorted({setting.top_k for setting in accuracy}, reverse=True)
    rows = [
        [f"{count} blocks", *(f"{accuracy[Setting(tier, count, top_k)].mean():.3f}" for top_k in top_ks)]
        for count in blocks
    ]
    return _markdown([f"{tier} tier", *(f"top-{top_k}" for top_k in top_ks)], rows)


@dataclass(frozen=True)
class Gain:
    """What the best single setting and the best settings by kind score on test at one budget."""

    budget_ms: float
    single: Setting
    right_single: float
    right_by_kind: float

    @property
    def points(self) -> float:
        return (self.right_by_kind - self.right_single) * 100


def choice_gains(measured: Measured, way: str) -> list[Gain]:
    """Return the gain of choosing by kind at nine budgets: chosen on validation, scored on test."""
    ms = measured.ms[way]
    gains = []
    for share in np.arange(0.1, 1.0, 0.1):
        budget_ms = ms[CHEAPEST] + share * (ms[FULL] - ms[CHEAPEST])
        single = best_single(measured.validation, ms, budget_ms)
        chosen = best_by_kind(measured.validation, ms, budget_ms)
        gains.append(Gain(budget_ms, single.by_kind[0], score(single, measured.test), score(chosen, measured.test)))
    return gains


def choice_table(measured: Measured, way: str) -> str:
    """Return the gains of choosing by kind as a table."""
    rows = [
        [f"{g.budget_ms:.1f}", str(g.single), f"{g.right_single:.3f}", f"{g.right_by_kind:.3f}", f"{g.points:+.1f}"]
        for g in choice_gains(measured, way)
    ]
    return _markdown(["budget ms", "best single setting", "right", "by kind", "points"], rows)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
