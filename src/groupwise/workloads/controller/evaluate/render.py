"""Tables and the chart of an evaluation, from the metrics in eval.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.latency.records import PREFILL
from groupwise.workloads.base import ReportTable
from groupwise.workloads.controller.evaluate.timing import CONTROLLER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHOD_NAMES = {
    "cheapest": "cheapest",
    "random_feasible": "random feasible",
    "slowest_feasible": "slowest feasible",
    "lookup": "lookup table",
    "table_by_first_word": "table by first word",
    "words_classifier": "words classifier",
    "words": "best by words",
    "one_stage": "one stage",
    "imitation": "imitation",
    "controller": "controller",
    "ceiling": "ceiling",
    "question_type_oracle": "question-type oracle",
    "per_question_oracle": "per-question oracle",
}
"""In the order of the tables."""
_ABLATION_NAMES = {
    "controller": "as it is",
    "question_swapped": "words of another question",
    "question_zeros": "words: zeros",
    "overview_swapped": "overview of another picture",
    "overview_zeros": "overview: zeros",
    "latency_token_swapped": "latency token of another picture",
    "latency_token_zeros": "latency token: zeros",
}
_NOT_RIVALS = ("cheapest", "random_feasible", "slowest_feasible", "per_question_oracle")
"""Methods that the lead over is not shown of."""
MIN_TIMED_ANSWERS = 5
"""Fixed configurations with fewer timed answers are not in the chart: their p50 would be noise."""
_STAGE_NAMES = {PREFILL: "prefill with controller", CONTROLLER: "  controller"}
DRIFT_THRESHOLD = 0.1
"""A larger change of the machine's speed is worth a note."""
Metrics = Mapping[str, Any]


def tables(metrics: Metrics) -> list[ReportTable]:
    return [
        _accuracy_table(metrics),
        _lead_table(metrics),
        _ablation_table(metrics),
        _latency_table(metrics),
        _knob_table(metrics),
        _stage_table(metrics),
        _headline_table(metrics),
    ]


def _accuracy_table(metrics: Metrics) -> ReportTable:
    budgets = metrics["budgets"]
    rows = [
        [
            title,
            *(f"{entry[name]['accuracy']:.1%}" for entry in budgets),
            f"{metrics['mean_accuracy'][name]:.1%}",
            f"{metrics['violations'][name]['rate']:.1%}",
        ]
        for name, title in METHOD_NAMES.items()
        if name in metrics["mean_accuracy"]
    ]
    rows.append(["uncontrolled", *("" for _ in budgets), f"{metrics['uncontrolled']['accuracy']:.1%}", ""])
    return ReportTable(
        "Accuracy by budget (ms)",
        ["method", *(f"{entry['budget_ms']:.1f}" for entry in budgets), "mean", "over\nbudget"],
        rows,
        f"{metrics['test_questions']} questions about {metrics['test_pictures']} test pictures. Each method is charged"
        f" its own time ({_own_times(metrics)}): it may choose what fits the budget with that. Tables are chosen on"
        f" {metrics['selection_questions']} selection questions. Best by words is the"
        f" {METHOD_NAMES[metrics['words_method']]}, the better one on the test questions."
        f"{_drop_order_note(metrics)} Over budget: measured latency above the budget by more than"
        f" {metrics['tolerance']:.0%}. Uncontrolled: the full configuration always.",
    )


def _own_times(metrics: Metrics) -> str:
    known = {name: own_ms for name, own_ms in metrics["own_ms"].items() if name in _CHARGED}
    return ", ".join(f"{METHOD_NAMES[name]} {own_ms:.2f} ms" for name, own_ms in known.items())


def _drop_order_note(metrics: Metrics) -> str:
    others = len(metrics["drop_orders"]) - 1
    if not others:
        return ""
    used = [
        METHOD_NAMES[name]
        for name in METHOD_NAMES
        if name in metrics["gains"] and name not in _NOT_RIVALS
        if any(entry[name]["other_drop_order"] > 0 for entry in metrics["budgets"])
    ]
    offered = f" All but the controller and imitation may drop blocks in {others} other order{'s'[: others - 1]}, too"
    return f"{offered}; used by: {', '.join(used) or 'none'}."


def _lead_table(metrics: Metrics) -> ReportTable:
    """How far the controller is ahead, under the same budgets and at the same latency."""
    at_equal = [metrics[f"at_equal_{latency}"] for latency in ("p50", "p95")]
    names = [name for name in METHOD_NAMES if name in metrics["gains"] and name not in _NOT_RIVALS]
    rows = [
        [METHOD_NAMES[name], _lead(metrics["gains"][name]), *(_lead(entry.get(name)) for entry in at_equal)]
        for name in names
    ]
    return ReportTable(
        "The controller's lead in points (95 % interval)",
        ["over", "same budget", "equal p50", "equal p95"],
        rows,
        "Means over the budgets; the intervals are a bootstrap over pictures. Equal p50 and p95: the area between the"
        " curves of accuracy by latency over the controller's range. The latency of all test questions follows from the"
        " estimates, the measured pace of answers with fixed knobs, and each method's own time.",
    )


def _lead(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return ""
    low, high = (100 * bound for bound in entry["interval"])
    return f"{100 * entry['mean']:+.1f} ({low:.1f}, {high:.1f})"


def _ablation_table(metrics: Metrics) -> ReportTable:
    ablation = metrics["ablation"]
    rows = [
        [title, f"{ablation[name]:.1%}", f"{100 * (ablation[name] - ablation['controller']):+.1f}"]
        for name, title in _ABLATION_NAMES.items()
        if name in ablation
    ]
    return ReportTable(
        "What the controller's inputs are worth",
        ["the controller with", "mean\naccuracy", "points"],
        rows,
        "One input replaced at a time, on all test questions under all budgets; the controller is not trained again.",
    )


def _latency_table(metrics: Metrics) -> ReportTable:
    methods = ("lookup", "words", "controller")
    rows = [
        [f"{entry['budget_ms']:.1f}", *(cell for name in methods for cell in _latency_cells(entry[name]))]
        for entry in metrics["budgets"]
    ]
    return ReportTable(
        "Measured latency of one answer (ms), and fraction over budget",
        ["budget", *(column for name in methods for column in (f"{name}\np50", "\np95", "\nover"))],
        rows,
        f"{metrics['timed_questions_per_budget']['controller']} answers per budget and method, one request at a time;"
        " methods and budgets are interleaved, so slowdowns of the machine affect all of them equally. Tables answer"
        " with fixed knobs, and their own time is added.",
    )


def _latency_cells(entry: Mapping[str, Any]) -> list[str]:
    return [f"{entry['p50_ms']:.1f}", f"{entry['p95_ms']:.1f}", f"{entry['violation_rate']:.1%}"]


def _knob_table(metrics: Metrics) -> ReportTable:
    """How often each option was chosen: all options of a knob in one cell."""
    entries = [entry["controller"]["knobs"] for entry in metrics["budgets"]]
    knobs = list(entries[0])
    rows = [
        [f"{entry['budget_ms']:.1f}", *(_histogram(shares[knob], knob) for knob in knobs)]
        for entry, shares in zip(metrics["budgets"], entries, strict=True)
    ]
    return ReportTable(
        "The controller's choices (% of questions)",
        ["budget", *(knob.replace("_", " ") for knob in knobs)],
        rows,
    )


def _histogram(shares: Mapping[str, float], knob: str) -> str:
    options = list(shares) if knob == "tier" else sorted(shares, key=int)
    return "  ".join(f"{option}:{100 * shares[option]:.0f}" for option in options if shares[option] >= 0.005)


def _stage_table(metrics: Metrics) -> ReportTable:
    """Estimated beside measured latency of the controller's answers."""
    served, fixed = metrics["estimate"]["controller"], metrics["estimate"]["fixed_knobs"]
    rows = [
        [
            _STAGE_NAMES.get(stage, stage),
            f"{entry['measured_p50_ms']:.2f}",
            "in prefill" if stage == CONTROLLER else f"{entry['estimated_p50_ms']:.2f}",
        ]
        for stage, entry in served["stages"].items()
    ]
    rows.append(["whole answer", f"{served['measured_p50_ms']:.2f}", f"{served['estimated_p50_ms']:.2f}"])
    return ReportTable(
        "The controller's answers by stage (p50, ms)",
        ["stage", "measured", "estimated"],
        rows,
        f"Error of the estimate: {_errors(served)} of answers above its {served['quantile']:.0%} quantile. With fixed"
        f" knobs: {_errors(fixed)} above.",
    )


def _errors(entry: Mapping[str, Any]) -> str:
    return (
        f"median {entry['median_error']:+.1%}, median absolute {entry['median_absolute_error']:.1%},"
        f" {entry['above_upper_quantile']:.1%}"
    )


def _headline_table(metrics: Metrics) -> ReportTable:
    overhead, violations = metrics["controller_overhead"], metrics["violations"]["controller"]
    words = METHOD_NAMES[metrics["words_method"]]
    rows = [
        ["mean accuracy of the controller", f"{metrics['mean_accuracy']['controller']:.1%}"],
        ["lead over the lookup table, points", _lead(metrics["gain_over_lookup"])],
        [f"lead over the {words}, points", _lead(metrics["gain_over_words"])],
        [
            f"answers over budget by more than {metrics['tolerance']:.0%}",
            _rate_with_interval(violations["rate"], violations["interval"]),
        ],
        ["controller's own time, p50", f"{overhead['p50_ms']:.2f} ms, {overhead['share_of_answer']:.1%} of an answer"],
        [
            "overhead against fixed knobs, p50",
            f"{overhead['overhead_p50_ms']:+.2f} ms, {overhead['overhead_share_of_answer']:.1%} of an answer",
        ],
    ]
    return ReportTable("Headline", ["", "test"], rows, _drift_note(metrics))


def _drift_note(metrics: Metrics) -> str:
    """What to know about a machine whose speed has changed; empty if it has not, or if nothing was profiled."""
    since, notes = metrics["slowdown_since_profile"], []
    if since is None:
        return ""
    if metrics["recalibrated"]:
        notes.append(
            f"Answers took {since:.2f} times as long as when this machine was profiled: the estimator was recalibrated,"
            " and budgets and estimates above follow it. In use, AdaptiveModel.recalibrate() does the same."
        )
    expected = 1.0 if metrics["recalibrated"] else since
    change = (1 + metrics["estimate"]["controller"]["median_error"]) / expected
    if abs(change - 1) >= DRIFT_THRESHOLD:
        notes.append(
            f"While they were timed, answers took {change:.2f} times as long as just before: the machine's speed has"
            " changed meanwhile. Check what else runs on it, and evaluate again."
        )
    return " ".join(notes)


def _rate_with_interval(rate: float, interval: Sequence[float]) -> str:
    return f"{rate:.1%} ({100 * interval[0]:.0f}-{100 * interval[1]:.0f})"


_LINES = {
    "ceiling": ("#999999", ":", "^"),
    "controller": ("#cc3311", "-", "o"),
    "words": ("#44aa77", "-", "D"),
    "lookup": ("#223355", "-", "s"),
}
"""Color, line style and marker of the methods in the chart."""
_CHARGED = ("controller", "words_classifier", "one_stage")
_TIER_COLORS = ("#bbddee", "#77aadd", "#4477aa", "#223377")
_GUIDE_COLOR = "#bbbbbb"


def draw(metrics: Metrics, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 5.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    _draw_accuracy(left, metrics)
    _draw_budgets(right, metrics)
    figure.suptitle("Controller under a latency budget", fontweight="bold")
    figure.supxlabel(
        f"Accuracy on {metrics['test_questions']} test questions. Latency is measured, one request at a time:"
        f" {metrics['timed_questions_per_budget']['controller']} answers per budget and method, and at least"
        f" {MIN_TIMED_ANSWERS} per fixed configuration.",
        fontsize=8,
        color="#555555",
    )
    figure.savefig(path)


def _draw_accuracy(axes: Axes, metrics: Metrics) -> None:
    """Accuracy against measured latency: everything is at the median of its timed answers."""
    fixed = [entry for entry in metrics["fixed_configurations"] if entry["answers"] >= MIN_TIMED_ANSWERS]
    tiers = list(dict.fromkeys(entry["knobs"]["tier"] for entry in metrics["fixed_configurations"]))
    for index, tier in enumerate(tiers):
        entries = [entry for entry in fixed if entry["knobs"]["tier"] == tier]
        if entries:
            axes.scatter(
                [entry["p50_ms"] for entry in entries],
                [100 * entry["accuracy"] for entry in entries],
                s=14,
                color=_TIER_COLORS[index % len(_TIER_COLORS)],
                linewidths=0,
                label=f"fixed, tier {tier}",
            )
    for name in _LINES:
        if name in metrics["mean_accuracy"]:
            _draw_method(axes, metrics, name)
    full = metrics["uncontrolled"]
    axes.plot(full["p50_ms"], 100 * full["accuracy"], "*", color="#aa8800", markersize=11, label="uncontrolled")
    _draw_budget_guides(axes, metrics)
    axes.set_xlabel("measured latency, ms (p50, whiskers to p95; dotted: budgets)")
    axes.set_ylabel("accuracy, %")
    axes.set_title("Accuracy vs. latency", fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    _finish(axes)


def _draw_method(axes: Axes, metrics: Metrics, name: str) -> None:
    """A marker at the p50 of each budget, a whisker to its p95."""
    (color, line, marker), entries = _LINES[name], [entry[name] for entry in metrics["budgets"]]
    whiskers = [entry["p95_ms"] - entry["p50_ms"] for entry in entries]
    axes.errorbar(
        [entry["p50_ms"] for entry in entries],
        [100 * entry["accuracy"] for entry in entries],
        xerr=[[0.0] * len(whiskers), whiskers],
        color=color,
        linestyle=line,
        marker=marker,
        markersize=5,
        capsize=2,
        ecolor=(color, 0.4),
        elinewidth=0.8,
        label=METHOD_NAMES[name],
    )


def _draw_budget_guides(axes: Axes, metrics: Metrics) -> None:
    """A light vertical line at every budget. Budgets far beyond all answers must not squeeze the measured points."""
    lowest, highest = axes.get_xlim()
    budgets = [entry["budget_ms"] for entry in metrics["budgets"] if entry["budget_ms"] <= 1.25 * highest]
    for budget in budgets:
        axes.axvline(budget, color=_GUIDE_COLOR, linewidth=0.8, linestyle=(0, (2, 3)), zorder=0)
        axes.annotate(
            f"budget {budget:.0f}",
            (budget, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(2, -2),
            textcoords="offset points",
            rotation=90,
            fontsize=6.5,
            color="#888888",
            va="top",
        )
    axes.set_xlim(lowest, max([highest, *(budget + 0.03 * (highest - lowest) for budget in budgets)]))


def _draw_budgets(axes: Axes, metrics: Metrics) -> None:
    """Median and 95 % quantile of measured answers against their budget."""
    budgets = [entry["budget_ms"] for entry in metrics["budgets"]]
    step = (max(budgets) - min(budgets)) / max(1, len(budgets) - 1) or max(budgets)
    limits = [min(budgets) - step / 2, max(budgets) + step / 2]
    tolerated = [(1 + metrics["tolerance"]) * value for value in limits]
    axes.plot(limits, limits, color="#555555", linewidth=1, label="budget")
    axes.fill_between(limits, limits, tolerated, color="#dddddd", linewidth=0, label=f"{metrics['tolerance']:.0%} over")
    methods = ("lookup", "words", "controller")
    for index, name in enumerate(methods):
        color, _, marker = _LINES[name]
        medians = [entry[name]["p50_ms"] for entry in metrics["budgets"]]
        whiskers = [entry[name]["p95_ms"] - entry[name]["p50_ms"] for entry in metrics["budgets"]]
        axes.errorbar(
            [budget + step * 0.16 * (index - (len(methods) - 1) / 2) for budget in budgets],
            medians,
            [[0.0] * len(whiskers), whiskers],
            color=color,
            marker=marker,
            linestyle="none",
            capsize=3,
            label=METHOD_NAMES[name],
        )
    axes.set_xlabel("budget, ms")
    axes.set_ylabel("measured latency, ms (p50, whiskers to p95)")
    axes.set_title("Measured latency vs. budget", fontsize=10)
    lowest, highest = axes.get_ylim()
    axes.set_ylim(lowest, highest + 0.35 * (highest - lowest))  # space for the legend
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
