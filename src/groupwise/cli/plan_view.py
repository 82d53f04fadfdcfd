"""A plan in the terminal: parts, settings, bars, what to lower.
The picture of a plan: parts stacked for the three settings, against the device's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from groupwise.core.units import format_bytes
from groupwise.memory.plan import MemoryPlan, PlannedSetting, nearest_valid_values
from groupwise.memory.stages import FRAMEWORK_PART

_COLOURS = ("blue", "cyan", "green", "yellow", "magenta", "red", "bright_blue", "bright_green", "bright_magenta")
_BAR = 60


def show(plan: MemoryPlan, checked: Mapping[str, Any], picture: Path | None) -> None:
    console = Console(highlight=False)
    shape = plan.current.shape
    console.print(
        f"{shape.conditions_per_step} conditions x {shape.group_size} members on {shape.ranks} ranks, device"
        f" {format_bytes(plan.device)}; peak {format_bytes(plan.current.stages.peak)} in {plan.current.stages.fullest}"
        f" = {plan.current.utilization:.0%}"
    )
    console.print(_parts(plan.current), _settings(plan), sep="\n")
    for name, found in plan.settings.items():
        console.print(_bar(name, found), soft_wrap=True)
    console.print(_legend(plan), soft_wrap=True)
    console.print(f"\n{_explain_group_size(plan)}")
    if plan.lower and (not plan.fits or plan.current.utilization > 0.9):
        console.print("\nWhat to lower first, each on top of those before:")
        for nth, step in enumerate(plan.lower, 1):
            console.print(f"  {nth}. {step}")
    near = {name: values for name, values in nearest_valid_values(shape).items() if values}
    listed = "; ".join(f"{name} {' or '.join(map(str, values))}" for name, values in near.items())
    console.print(f"\nNearest that divide, one changed at a time: {listed}.")
    for kind, found_bytes in checked.items():
        for stage, size in found_bytes.items():
            parts = getattr(plan.current.stages, stage)
            planned = sum(parts.values()) - parts[FRAMEWORK_PART]
            off = f"{planned / size - 1:+.1%}"
            console.print(
                f"{kind} of the {stage}: {format_bytes(size)}; planned, without margin: {format_bytes(planned)} ({off})"
            )
    if picture is not None:
        console.print(f"Picture: {picture}")


def _explain_group_size(plan: MemoryPlan) -> str:
    """What the numbers that are no memory knobs do."""
    grown = {name: peak / plan.current.stages.peak - 1 for name, peak in plan.doubled.items()}
    told = "; ".join(f"twice the {name}: {share:+.1%}" for name, share in grown.items())
    why = "" if max(grown.values()) < 0.02 else ", because the rollout holds more rows then"
    return (
        "group_size and conditions_per_step are loops over passes: training needs no more memory for more of them. The"
        f" peak changes ({told}{why}). They change how many rollouts a step compares, and so its time and the noise of"
        " its gradient. rows_per_pass changes memory and speed, never the result."
    )


def _parts(setting: PlannedSetting) -> Table:
    table = Table(title="Bytes by part, on each rank", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("part", "rollout", "update"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    stages = setting.stages
    for name in dict.fromkeys([*stages.update, *stages.rollout]):
        table.add_row(name, *(_size(parts.get(name, 0)) for parts in (stages.rollout, stages.update)))
    table.add_section()
    table.add_row("peak", *(_size(sum(parts.values())) for parts in (stages.rollout, stages.update)))
    return table


def _size(size: int) -> str:
    return format_bytes(size) if size else "-"


def _settings(plan: MemoryPlan) -> Table:
    table = Table(title="Three settings", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in plan.settings:
        table.add_column(name, justify="right")
    every, passes = list(plan.settings.values()), plan.current.shape.passes
    rows = {
        "rows_per_pass": [str(found.shape.rows_per_pass) for found in every],
        "conditions_per_step": [str(found.shape.conditions_per_step) for found in every],
        "group_size": [str(found.shape.group_size) for found in every],
        "memory on each rank": [format_bytes(found.stages.peak) for found in every],
        "of the device": [f"{found.utilization:.0%}" for found in every],
        "rollouts per step": [str(found.shape.rollouts_per_step) for found in every],
        "passes per step": [str(found.shape.passes) for found in every],
        "what it buys": [_gain(found, passes, plan.current) for found in every],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _gain(found: PlannedSetting, passes: int, current: PlannedSetting) -> str:
    growth = found.shape.conditions_per_step // current.shape.conditions_per_step
    fewer = passes * growth / found.shape.passes
    told = [f"{fewer:.3g}x fewer passes"] if fewer > 1 else [f"{1 / fewer:.3g}x more passes"] if fewer < 1 else []
    told += [f"{growth}x the groups"] if growth > 1 else []
    return ", ".join(told) or "-"


def _bar(name: str, found: PlannedSetting) -> Text:
    """Parts side by side, the device's end marked; what does not fit goes beyond it."""
    parts = getattr(found.stages, found.stages.fullest)
    whole, text = max(found.device, found.stages.peak), Text(f"{name:<12}")
    drawn = used = 0
    for nth, size in enumerate(parts.values()):
        used += size
        upto = round(_BAR * used / whole)
        text.append("█" * (upto - drawn), style=_COLOURS[nth % len(_COLOURS)])
        drawn = max(drawn, upto)
    text.append("░" * (_BAR - drawn))
    text.append(f" {found.utilization:.0%}" + ("" if found.fits else "  does not fit"))
    return text


def _legend(plan: MemoryPlan) -> Text:
    found = plan.current.stages
    text = Text(" " * 12)
    for nth, name in enumerate(getattr(found, found.fullest)):
        text.append("█ ", style=_COLOURS[nth % len(_COLOURS)]).append(f"{name}  ")
    return text


_CHART_COLORS = (
    "#4477aa",
    "#66ccee",
    "#228833",
    "#ccbb44",
    "#ee6677",
    "#aa3377",
    "#bbbbbb",
    "#223355",
    "#ee8866",
    "#44bb99",
)


def draw(plan: MemoryPlan, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bars = [
        (f"{name}\n{stage}", getattr(found.stages, stage))
        for name, found in plan.settings.items()
        for stage in ("rollout", "update")
    ]
    names = list(dict.fromkeys(name for _, parts in bars for name in parts))
    floor = [0.0] * len(bars)
    for nth, name in enumerate(names):
        heights = [parts.get(name, 0) / 2**30 for _, parts in bars]
        axes.bar(
            range(len(bars)),
            heights,
            bottom=floor,
            width=0.6,
            color=_CHART_COLORS[nth % len(_CHART_COLORS)],
            label=name,
        )
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    axes.axhline(plan.device / 2**30, color="black", linestyle="--", linewidth=1)
    axes.text(len(bars) - 0.5, plan.device / 2**30, "device", ha="right", va="bottom", fontsize=9)
    axes.set_xticks(range(len(bars)), [label for label, _ in bars])
    axes.set_ylabel("GiB on each rank")
    axes.set_ylim(0, 1.12 * max(*floor, plan.device / 2**30))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path)
