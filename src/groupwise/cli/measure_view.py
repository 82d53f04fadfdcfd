"""Tables and chart of `groupwise measure`: stages by tier, totals by depth and by top-k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.cli.tables import print_table
from groupwise.latency.records import STAGES, LatencySummary
from groupwise.workloads.base import ReportTable
from groupwise.workloads.controller.model.knobs import Knobs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Summaries = Mapping[Knobs, LatencySummary]


def show(summaries: Summaries, full: Knobs, *, title: str, notes: Sequence[str]) -> None:
    print(f"{title}: milliseconds of one answer, measured", *notes, sep="\n")
    print_table(_table(by_depth(summaries, full), "blocks", f"By tier and depth, top-k {full.top_k}"))
    of_top_k = by_top_k(summaries, full)
    if len({knobs.top_k for knobs in of_top_k}) > 1:
        print_table(_table(of_top_k, "top-k", f"By tier and top-k, {full.blocks} blocks"))


def by_depth(summaries: Summaries, full: Knobs) -> dict[Knobs, LatencySummary]:
    return {knobs: summary for knobs, summary in summaries.items() if knobs.top_k == full.top_k}


def by_top_k(summaries: Summaries, full: Knobs) -> dict[Knobs, LatencySummary]:
    tiers = list(dict.fromkeys(knobs.tier for knobs in summaries))
    of_full_depth = [knobs for knobs in summaries if knobs.blocks == full.blocks]
    of_full_depth.sort(key=lambda knobs: (tiers.index(knobs.tier), knobs.top_k))
    return {knobs: summaries[knobs] for knobs in of_full_depth}


def _table(summaries: Summaries, knob: str, title: str) -> ReportTable:
    """One row per setting, in one section per tier."""
    columns = ["tier", knob, *(f"{stage}\np50" for stage in STAGES), "decode step\np50"]
    columns += ["total\np50", "total\np95", "total\nIQR"]
    rows: list[list[str]] = []
    tier = None
    for knobs, summary in summaries.items():
        if tier not in (None, knobs.tier):
            rows.append([])
        step, total = summary.decode_step, summary.total
        stages = [_ms(summary.stages[stage].p50_ms) for stage in STAGES]
        totals = [_ms(value) for value in (total.p50_ms, total.p95_ms, total.iqr_ms)]
        name = knobs.tier if knobs.tier != tier else ""
        rows.append([name, str(_value(knobs, knob)), *stages, _ms(step.p50_ms) if step else "-", *totals])
        tier = knobs.tier
    return ReportTable(title, columns, rows)


def _ms(value: float) -> str:
    return f"{value:.1f}"


_STAGE_COLORS = dict(zip(STAGES, ("#4477aa", "#ee8866", "#bbcc33"), strict=True))
_TIER_STYLES = (("#66aadd", "o"), ("#44aa77", "s"), ("#223355", "^"), ("#aa3377", "D"))


def draw(summaries: Summaries, full: Knobs, *, title: str, notes: Sequence[str], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {
        ("blocks", f"Total by depth, top-k {full.top_k}"): by_depth(summaries, full),
        ("top-k", f"Total by top-k, {full.blocks} blocks"): by_top_k(summaries, full),
    }
    panels = {key: rows for key, rows in panels.items() if len({_value(knobs, key[0]) for knobs in rows}) > 1}
    figure = Figure(figsize=(4.2 * (1 + len(panels)), 4.8), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    first, *others = figure.subplots(1, 1 + len(panels), squeeze=False)[0]
    _bars(
        first, {knobs: summary for knobs, summary in by_depth(summaries, full).items() if knobs.blocks == full.blocks}
    )
    for axes, ((knob, heading), rows) in zip(others, panels.items(), strict=True):
        _lines(axes, rows, knob)
        axes.set_title(heading, fontsize=10)
    figure.suptitle(title, fontweight="bold")
    figure.supxlabel("\n".join(notes), fontsize=8, color="#555555")
    figure.savefig(path)


def _bars(axes: Axes, rows: Summaries) -> None:
    """Stacked medians of the stages; a value that does not fit inside its segment is written beside it."""
    floor, highest = [0.0] * len(rows), max(summary.total.p50_ms for summary in rows.values())
    for stage in STAGES:
        heights = [summary.stages[stage].p50_ms for summary in rows.values()]
        axes.bar(range(len(rows)), heights, bottom=floor, width=0.55, color=_STAGE_COLORS[stage], label=stage)
        for index, (low, height) in enumerate(zip(floor, heights, strict=True)):
            fits = height > 0.06 * highest
            if height:
                x, anchor = (index, "center") if fits else (index + 0.3, "left")
                axes.text(x, low + height / 2, f"{height:.1f}", ha=anchor, va="center", fontsize=8)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    axes.set_xticks(range(len(rows)), [knobs.tier for knobs in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("tier")
    axes.set_title("Stages, all blocks and experts", fontsize=10)
    _finish(axes, max(floor), "milliseconds (p50)")


def _lines(axes: Axes, rows: Summaries, knob: str) -> None:
    """One line per tier through the medians; whiskers reach up to p95."""
    tiers = list(dict.fromkeys(knobs.tier for knobs in rows))
    for index, tier in reversed(list(enumerate(tiers))):
        points = {_value(knobs, knob): summary.total for knobs, summary in rows.items() if knobs.tier == tier}
        middle = [total.p50_ms for total in points.values()]
        above = [total.p95_ms - total.p50_ms for total in points.values()]
        color, marker = _TIER_STYLES[index % len(_TIER_STYLES)]
        shifted = [value + 0.06 * (index - (len(tiers) - 1) / 2) for value in points]
        none = [0.0] * len(above)
        axes.errorbar(shifted, middle, [none, above], color=color, marker=marker, elinewidth=1, capsize=2, label=tier)
        axes.set_xticks(list(points))
    axes.set_xlabel(knob)
    _finish(axes, max(summary.total.p95_ms for summary in rows.values()), "milliseconds (p50, whiskers to p95)")


def _finish(axes: Axes, highest: float, unit: str) -> None:
    """The axis starts at 0 and leaves room for the legend."""
    axes.set_ylim(0, 1.25 * highest)
    axes.set_ylabel(unit)
    axes.legend(loc="upper center", ncols=5, fontsize=8, frameon=False, columnspacing=1.2)
    axes.spines[["top", "right"]].set_visible(False)


def _value(knobs: Knobs, knob: str) -> int:
    return knobs.blocks if knob == "blocks" else knobs.top_k
