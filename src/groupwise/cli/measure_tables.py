"""What `groupwise measure` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from groupwise.meter.latency import STAGES
from groupwise.meter.timing import Summary
from groupwise.workloads.controller.knobs import Knobs


def show(found: Mapping[Knobs, Summary], full: Knobs, *, title: str, notes: Sequence[str]) -> None:
    console = Console()
    console.print(f"{title}: milliseconds of one answer, measured", highlight=False)
    for note in notes:
        console.print(note, highlight=False)
    console.print(_table(by_depth(found, full), "blocks", f"By tier and depth, top-k {full.top_k}"))
    by_experts = by_top_k(found, full)
    if len({knobs.top_k for knobs in by_experts}) > 1:
        console.print(_table(by_experts, "top-k", f"By tier and top-k, {full.blocks} blocks"))


def by_depth(found: Mapping[Knobs, Summary], full: Knobs) -> dict[Knobs, Summary]:
    return {knobs: summary for knobs, summary in found.items() if knobs.top_k == full.top_k}


def by_top_k(found: Mapping[Knobs, Summary], full: Knobs) -> dict[Knobs, Summary]:
    return {
        knobs: summary
        for knobs, summary in sorted(found.items(), key=lambda row: (_tiers(found).index(row[0].tier), row[0].top_k))
        if knobs.blocks == full.blocks
    }


def _tiers(found: Mapping[Knobs, Summary]) -> list[str]:
    return list(dict.fromkeys(knobs.tier for knobs in found))


def _table(rows: Mapping[Knobs, Summary], knob: str, title: str) -> Table:
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
        whole = [_ms(value) for value in (total.p50_ms, total.p95_ms, total.spread_ms)]
        value = knobs.blocks if knob == "blocks" else knobs.top_k
        table.add_row(
            knobs.tier if knobs.tier != before else "", str(value), *stages, _ms(step.p50_ms) if step else "-", *whole
        )
        before = knobs.tier
    return table


def _ms(value: float) -> str:
    return f"{value:.1f}"
