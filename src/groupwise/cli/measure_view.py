"""What `groupwise measure` prints.
The picture of `groupwise measure`: stages by tier, totals by depth and by top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from groupwise.latency.records import STAGES, LatencySummary
from groupwise.workloads.controller.model.knobs import Knobs

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def show(found: Mapping[Knobs, LatencySummary], full: Knobs, *, title: str, notes: Sequence[str]) -> None:
    console = Console()
    console.print(f"{title}: milliseconds of one answer, measured", highlight=False)
    for note in notes:
        console.print(note, highlight=False)
    console.print(_table(by_depth(found, full), "blocks", f"By tier and depth, top-k {full.top_k}"))
    by_experts = by_top_k(found, full)
    if len({knobs.top_k for knobs in by_experts}) > 1:
        console.print(_table(by_experts, "top-k", f"By tier and top-k, {full.blocks} blocks"))


def by_depth(found: Mapping[Knobs, LatencySummary], full: Knobs) -> dict[Knobs, LatencySummary]:
    return {knobs: summary for knobs, summary in found.items() if knobs.top_k == full.top_k}


def by_top_k(found: Mapping[Knobs, LatencySummary], full: Knobs) -> dict[Knobs, LatencySummary]:
    return {
        knobs: summary
        for knobs, summary in sorted(found.items(), key=lambda row: (_tiers(found).index(row[0].tier), row[0].top_k))
        if knobs.blocks == full.blocks
    }


def _tiers(found: Mapping[Knobs, LatencySummary]) -> list[str]:
    return list(dict.fromkeys(knobs.tier for knobs in found))


def _table(rows: Mapping[Knobs, LatencySummary], knob: str, title: str) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("tier")
    headings = [*(f"{stage}\np50" for stage in STAGES), "a step\np50", "total\np50", "total\np95", "total\nspread"]
    for heading in (knob, *headings):
        table.add_column(heading, justify="right")
    before = None
    for knobs, summary in rows.items():
        if before not in (None, knobs.tier):
            table.add_section()
        step, total = summary.decode_step, summary.total
        stages = [_ms(summary.stages[stage].p50_ms) for stage in STAGES]
        whole = [_ms(value) for value in (total.p50_ms, total.p95_ms, total.iqr_ms)]
        value = knobs.blocks if knob == "blocks" else knobs.top_k
        table.add_row(
            knobs.tier if knobs.tier != before else "", str(value), *stages, _ms(step.p50_ms) if step else "-", *whole
        )
        before = knobs.tier
    return table


def _ms(value: float) -> str:
    return f"{value:.1f}"


_STAGE_COLOURS = dict(zip(STAGES, ("#4477aa", "#ee8866", "#bbcc33"), strict=True))
_TIER_LOOKS = (("#66aadd", "o"), ("#44aa77", "s"), ("#223355", "^"), ("#aa3377", "D"))


def draw(found: Mapping[Knobs, LatencySummary], full: Knobs, *, title: str, notes: Sequence[str], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = {
        ("blocks", f"Total by depth, top-k {full.top_k}"): by_depth(found, full),
        ("top-k", f"Total by top-k, {full.blocks} blocks"): by_top_k(found, full),
    }
    lines = {names: rows for names, rows in lines.items() if len({_value(knobs, names[0]) for knobs in rows}) > 1}
    figure = Figure(figsize=(4.2 * (1 + len(lines)), 4.8), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    first, *others = figure.subplots(1, 1 + len(lines), squeeze=False)[0]
    _bars(first, {knobs: summary for knobs, summary in by_depth(found, full).items() if knobs.blocks == full.blocks})
    for axes, ((knob, heading), rows) in zip(others, lines.items(), strict=True):
        _lines(axes, rows, knob)
        axes.set_title(heading, fontsize=10)
    figure.suptitle(title, fontweight="bold")
    figure.supxlabel("\n".join(notes), fontsize=8, color="#555555")
    figure.savefig(path)


def _bars(axes: Axes, rows: Mapping[Knobs, LatencySummary]) -> None:
    """Medians of the stages, one on the other; a value that does not fit inside its piece stands beside it."""
    floor, highest = [0.0] * len(rows), max(summary.total.p50_ms for summary in rows.values())
    for stage in STAGES:
        heights = [summary.stages[stage].p50_ms for summary in rows.values()]
        axes.bar(range(len(rows)), heights, bottom=floor, width=0.55, color=_STAGE_COLOURS[stage], label=stage)
        for nth, (low, height) in enumerate(zip(floor, heights, strict=True)):
            fits = height > 0.06 * highest
            if height:
                place, anchor = (nth, "center") if fits else (nth + 0.3, "left")
                axes.text(place, low + height / 2, f"{height:.1f}", ha=anchor, va="center", fontsize=8)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    axes.set_xticks(range(len(rows)), [knobs.tier for knobs in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("tier")
    axes.set_title("Stages, all blocks and experts", fontsize=10)
    _finish(axes, max(floor), "milliseconds (p50)")


def _lines(axes: Axes, rows: Mapping[Knobs, LatencySummary], knob: str) -> None:
    """One line a tier through the medians; whiskers reach up to p95."""
    tiers = list(dict.fromkeys(knobs.tier for knobs in rows))
    for nth, tier in reversed(list(enumerate(tiers))):
        points = {_value(knobs, knob): summary.total for knobs, summary in rows.items() if knobs.tier == tier}
        middle = [total.p50_ms for total in points.values()]
        above = [total.p95_ms - total.p50_ms for total in points.values()]
        color, marker = _TIER_LOOKS[nth % len(_TIER_LOOKS)]
        beside = [value + 0.06 * (nth - (len(tiers) - 1) / 2) for value in points]
        none = [0.0] * len(above)
        axes.errorbar(beside, middle, [none, above], color=color, marker=marker, elinewidth=1, capsize=2, label=tier)
        axes.set_xticks(list(points))
    axes.set_xlabel(knob)
    _finish(axes, max(summary.total.p95_ms for summary in rows.values()), "milliseconds (p50, whiskers to p95)")


def _finish(axes: Axes, highest: float, unit: str) -> None:
    """From zero, with room for the legend above."""
    axes.set_ylim(0, 1.25 * highest)
    axes.set_ylabel(unit)
    axes.legend(loc="upper center", ncols=5, fontsize=8, frameon=False, columnspacing=1.2)
    axes.spines[["top", "right"]].set_visible(False)


def _value(knobs: Knobs, knob: str) -> int:
    return knobs.blocks if knob == "blocks" else knobs.top_k
