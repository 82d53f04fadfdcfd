"""Accuracy against latency in one picture, and beside it how the budget was kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.workloads.controller.validate.statistics import is_noise
from groupwise.workloads.controller.validate.tables import NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Figures = Mapping[str, Any]
_LINES = {
    "oracle": ("#999999", ":", "v"),
    "kind_oracle": ("#44aa77", "--", "^"),
    "controller": ("#cc3311", "-", "o"),
    "imitation": ("#ee8866", "-", "x"),
    "lookup": ("#223355", "-", "s"),
}
_TIERS = ("#bbddee", "#77aadd", "#4477aa", "#223377")


def draw(figures: Figures, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 5.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    _accuracy(left, figures)
    _budgets(right, figures)
    closed = figures["gap_closed"]
    told = "no gap to close" if closed is None else f"{closed:.0%} of the gap closed"
    if closed is not None and is_noise(figures["gap_closed_interval"]):
        told = "the gap to close is smaller than its noise"
    figure.suptitle(f"Controller under a latency budget: {told}", fontweight="bold")
    figure.supxlabel(
        f"Accuracy of {figures['test_questions']} test questions. Milliseconds are measured, one request at a time:"
        f" {figures['timed_questions_per_budget']['controller']} answers a budget.",
        fontsize=8,
        color="#555555",
    )
    figure.savefig(path)


def _accuracy(axes: Axes, figures: Figures) -> None:
    """Single configurations as dots where they take their time, methods as lines over the budgets they were given."""
    tiers = list(dict.fromkeys(single["knobs"]["tier"] for single in figures["singles"]))
    for nth, tier in enumerate(tiers):
        dots = [single for single in figures["singles"] if single["knobs"]["tier"] == tier]
        axes.scatter(
            [dot["p50_ms"] for dot in dots],
            [100 * dot["accuracy"] for dot in dots],
            s=14,
            color=_TIERS[nth % len(_TIERS)],
            linewidths=0,
            label=f"single, tier {tier}",
        )
    for name, (colour, line, marker) in _LINES.items():
        if name in figures["mean_accuracy"]:
            points = [(entry["budget_ms"], 100 * entry[name]["accuracy"]) for entry in figures["budgets"]]
            axes.plot(*zip(*points, strict=True), line, color=colour, marker=marker, markersize=5, label=NAMES[name])
    axes.set_xlabel("milliseconds (dots: measured p50; lines: the budget)")
    axes.set_ylabel("accuracy, %")
    axes.set_title("What the time buys", fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    _finish(axes)


def _budgets(axes: Axes, figures: Figures) -> None:
    """Median and 95 % of measured answers against the budget that they had."""
    budgets = [entry["budget_ms"] for entry in figures["budgets"]]
    gap = (max(budgets) - min(budgets)) / max(1, len(budgets) - 1) or max(budgets)
    limit = [min(budgets) - gap / 2, max(budgets) + gap / 2]
    allowed = [(1 + figures["tolerance"]) * value for value in limit]
    axes.plot(limit, limit, color="#555555", linewidth=1, label="budget")
    axes.fill_between(limit, limit, allowed, color="#dddddd", linewidth=0, label=f"{figures['tolerance']:.0%} over")
    for nth, name in enumerate(("lookup", "controller")):
        colour, _, marker = _LINES[name]
        middle = [entry[name]["p50_ms"] for entry in figures["budgets"]]
        above = [entry[name]["p95_ms"] - entry[name]["p50_ms"] for entry in figures["budgets"]]
        beside = [budget + gap * (0.16 * nth - 0.08) for budget in budgets]
        axes.errorbar(
            beside,
            middle,
            [[0.0] * len(above), above],
            color=colour,
            marker=marker,
            linestyle="none",
            capsize=3,
            label=NAMES[name],
        )
    axes.set_xlabel("budget, ms")
    axes.set_ylabel("measured ms (p50, whiskers to p95)")
    axes.set_title("How the budget was kept", fontsize=10)
    lowest, highest = axes.get_ylim()
    axes.set_ylim(lowest, highest + 0.35 * (highest - lowest))  # room for the legend
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
