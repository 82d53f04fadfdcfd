"""The evaluation's tables for the screen, made from its metrics.
Accuracy against latency in one picture, and beside it how the budget was kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.latency.records import PREFILL
from groupwise.workloads.base import ReportTable
from groupwise.workloads.controller.evaluate.metrics import interval_too_wide
from groupwise.workloads.controller.evaluate.timing import CONTROLLER

if TYPE_CHECKING:
    from matplotlib.axes import Axes


METHODS = ("cheapest", "random", "dearest", "lookup", "imitation", "controller", "kind_oracle", "oracle")
"""From floor to ceiling, as they are shown."""
NAMES = {
    "cheapest": "cheapest",
    "random": "random",
    "dearest": "dearest",
    "lookup": "lookup table",
    "imitation": "imitation",
    "controller": "controller",
    "kind_oracle": "kind oracle",
    "oracle": "sample oracle",
}
_STAGE_NAMES = {PREFILL: "prefill, with choosing", CONTROLLER: "  choosing"}
DRIFT_THRESHOLD = 0.1
"""From so large a change on, something must have happened to the machine."""
Metrics = Mapping[str, Any]


def tables(metrics: Metrics) -> list[ReportTable]:
    return [_accuracy(metrics), _latency(metrics), _knobs(metrics), _stages(metrics), _headline(metrics)]


def _shown(metrics: Metrics) -> list[str]:
    return [name for name in METHODS if name in metrics["mean_accuracy"]]


def _accuracy(metrics: Metrics) -> ReportTable:
    budgets = metrics["budgets"]
    rows = [
        [
            NAMES[name],
            *(f"{entry[name]['accuracy']:.1%}" for entry in budgets),
            f"{metrics['mean_accuracy'][name]:.1%}",
            f"{metrics['violations'][name]['rate']:.1%}",
        ]
        for name in _shown(metrics)
    ]
    return ReportTable(
        "Accuracy under a budget (ms)",
        ["method", *(f"{entry['budget_ms']:.1f}" for entry in budgets), "mean", "too slow"],
        rows,
        f"{metrics['test_questions']} test questions; lookup table and kind oracle chosen on"
        f" {metrics['choose_questions']} others. Too slow: measured over budget by more than"
        f" {metrics['tolerance']:.0%}; the controller's own time is part of it.",
    )


def _latency(metrics: Metrics) -> ReportTable:
    shown = ("lookup", "controller")
    rows = []
    for entry in metrics["budgets"]:
        cells = [[f"{entry[name]['p50_ms']:.1f}", f"{entry[name]['p95_ms']:.1f}", _late(entry[name])] for name in shown]
        rows.append([f"{entry['budget_ms']:.1f}", *cells[0], *cells[1]])
    return ReportTable(
        "Measured milliseconds of one answer, and how many were too slow (95 % interval)",
        ["budget", *(what for name in shown for what in (f"{name}\np50", "\np95", "\ntoo slow"))],
        rows,
        f"{metrics['timed_questions_per_budget']['controller']} answers a budget and method, one request at a time,"
        " those of all methods and budgets in mixed order.",
    )


def _knobs(metrics: Metrics) -> ReportTable:
    """How often each option was chosen: all of one knob in one cell."""
    entries = [entry["controller"]["knobs"] for entry in metrics["budgets"]]
    knobs = list(entries[0])
    rows = [
        [f"{entry['budget_ms']:.1f}", *(_histogram(shares[knob], knob) for knob in knobs)]
        for entry, shares in zip(metrics["budgets"], entries, strict=True)
    ]
    return ReportTable(
        "What the controller chose (per cent of questions)",
        ["budget", *(knob.replace("_", " ") for knob in knobs)],
        rows,
    )


def _histogram(shares: Mapping[str, float], knob: str) -> str:
    options = list(shares) if knob == "tier" else sorted(shares, key=int)
    return "  ".join(f"{option}:{100 * shares[option]:.0f}" for option in options if shares[option] >= 0.005)


def _stages(metrics: Metrics) -> ReportTable:
    """Estimated beside measured, for the controller's answers."""
    found, given = metrics["estimate"]["controlled"], metrics["estimate"]["given_knobs"]
    rows = [
        [
            _STAGE_NAMES.get(stage, stage),
            f"{each['measured_p50_ms']:.2f}",
            "in prefill" if stage == CONTROLLER else f"{each['estimated_p50_ms']:.2f}",
        ]
        for stage, each in found["stages"].items()
    ]
    rows.append(["whole answer", f"{found['measured_p50_ms']:.2f}", f"{found['estimated_p50_ms']:.2f}"])
    return ReportTable(
        "The controller's answers by stage (p50, ms)",
        ["stage", "measured", "estimated"],
        rows,
        f"Error of the estimate: median {found['median_error']:+.1%}, of its size {found['median_absolute_error']:.1%};"
        f" {found['above_high_quantile']:.1%} above the {found['quantile']:.0%} quantile. With given knobs: median"
        f" {given['median_error']:+.1%}, of its size {given['median_absolute_error']:.1%},"
        f" {given['above_high_quantile']:.1%} above.",
    )


def _headline(metrics: Metrics) -> ReportTable:
    own, late = metrics["controller_time"], metrics["violations"]["controller"]
    rows = [
        ["gap from lookup table to kind oracle closed", _gap(metrics, "gap_closed")],
        ["gap to the per-sample oracle closed", _gap(metrics, "gap_closed_per_sample")],
        [f"answers over budget by more than {metrics['tolerance']:.0%}", _share(late)],
        ["controller's own time, p50", f"{own['p50_ms']:.2f} ms, {own['share_of_answer']:.1%} of the answers'"],
        ["what being controlled adds, p50", f"{own['added_p50_ms']:+.2f} ms"],
    ]
    return ReportTable("Headline", ["", "test"], rows, _drift_note(metrics))


def _drift_note(metrics: Metrics) -> str:
    """What to make of a machine that has changed; nothing if it has not, or if nothing was profiled."""
    since, told = metrics["pace_since_profile"], []
    if since is None:
        return ""
    if metrics["recalibrated"]:
        told.append(
            f"Answers took {since:.2f} times as long as when this machine was profiled: budgets and estimates above are"
            " those of now. In use, AdaptiveModel.recalibrate() does the same."
        )
    expected = 1.0 if metrics["recalibrated"] else since
    change = (1 + metrics["estimate"]["controlled"]["median_error"]) / expected
    if abs(change - 1) >= DRIFT_THRESHOLD:
        told.append(
            f"While they were timed, answers took {change:.2f} times as long as just before: the machine has changed"
            " its pace meanwhile. See what else runs on it, and evaluate again."
        )
    return " ".join(told)


def _gap(metrics: Metrics, key: str) -> str:
    if metrics[key] is None:
        return "no gap"
    interval = metrics[f"{key}_interval"]
    noise = ": less than its noise" if interval_too_wide(interval) else ""
    return f"{metrics[key]:.0%}" + (f" ({interval[0]:.0%} to {interval[1]:.0%})" if interval else "") + noise


def _share(counted: Mapping[str, Any]) -> str:
    return _interval(counted["rate"], counted["interval"])


def _late(entry: Mapping[str, Any]) -> str:
    return _interval(entry["violation_rate"], entry["violation_interval"])


def _interval(rate: float, bounds: Sequence[float]) -> str:
    return f"{rate:.1%} ({100 * bounds[0]:.0f}-{100 * bounds[1]:.0f})"


_LINES = {
    "oracle": ("#999999", ":", "v"),
    "kind_oracle": ("#44aa77", "--", "^"),
    "controller": ("#cc3311", "-", "o"),
    "imitation": ("#ee8866", "-", "x"),
    "lookup": ("#223355", "-", "s"),
}
_TIERS = ("#bbddee", "#77aadd", "#4477aa", "#223377")


def draw(metrics: Metrics, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 5.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    _draw_accuracy(left, metrics)
    _budgets(right, metrics)
    closed = metrics["gap_closed"]
    told = "no gap to close" if closed is None else f"{closed:.0%} of the gap closed"
    if closed is not None and interval_too_wide(metrics["gap_closed_interval"]):
        told = "the gap to close is smaller than its noise"
    figure.suptitle(f"Controller under a latency budget: {told}", fontweight="bold")
    figure.supxlabel(
        f"Accuracy of {metrics['test_questions']} test questions. Milliseconds are measured, one request at a time:"
        f" {metrics['timed_questions_per_budget']['controller']} answers a budget.",
        fontsize=8,
        color="#555555",
    )
    figure.savefig(path)


def _draw_accuracy(axes: Axes, metrics: Metrics) -> None:
    """Single configurations as dots where they take their time, methods as lines over the budgets they were given."""
    tiers = list(dict.fromkeys(single["knobs"]["tier"] for single in metrics["singles"]))
    for nth, tier in enumerate(tiers):
        dots = [single for single in metrics["singles"] if single["knobs"]["tier"] == tier]
        axes.scatter(
            [dot["p50_ms"] for dot in dots],
            [100 * dot["accuracy"] for dot in dots],
            s=14,
            color=_TIERS[nth % len(_TIERS)],
            linewidths=0,
            label=f"single, tier {tier}",
        )
    for name, (color, line, marker) in _LINES.items():
        if name in metrics["mean_accuracy"]:
            points = [(entry["budget_ms"], 100 * entry[name]["accuracy"]) for entry in metrics["budgets"]]
            axes.plot(*zip(*points, strict=True), line, color=color, marker=marker, markersize=5, label=NAMES[name])
    axes.set_xlabel("milliseconds (dots: measured p50; lines: the budget)")
    axes.set_ylabel("accuracy, %")
    axes.set_title("What the time buys", fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    _finish(axes)


def _budgets(axes: Axes, metrics: Metrics) -> None:
    """Median and 95 % of measured answers against the budget that they had."""
    budgets = [entry["budget_ms"] for entry in metrics["budgets"]]
    gap = (max(budgets) - min(budgets)) / max(1, len(budgets) - 1) or max(budgets)
    limit = [min(budgets) - gap / 2, max(budgets) + gap / 2]
    allowed = [(1 + metrics["tolerance"]) * value for value in limit]
    axes.plot(limit, limit, color="#555555", linewidth=1, label="budget")
    axes.fill_between(limit, limit, allowed, color="#dddddd", linewidth=0, label=f"{metrics['tolerance']:.0%} over")
    for nth, name in enumerate(("lookup", "controller")):
        color, _, marker = _LINES[name]
        middle = [entry[name]["p50_ms"] for entry in metrics["budgets"]]
        above = [entry[name]["p95_ms"] - entry[name]["p50_ms"] for entry in metrics["budgets"]]
        beside = [budget + gap * (0.16 * nth - 0.08) for budget in budgets]
        axes.errorbar(
            beside,
            middle,
            [[0.0] * len(above), above],
            color=color,
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
