"""A memory plan on the terminal (tables, bars, what to reduce) and as a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from groupwise.cli.tables import print_table
from groupwise.core.units import format_bytes
from groupwise.memory.plan import MemoryPlan, PlannedSetting, describe_fewest_ranks, nearest_valid_values
from groupwise.memory.stages import FRAMEWORK_PART
from groupwise.workloads.base import ReportTable

_BAR_WIDTH = 60
_BAR_COLORS = ("blue", "cyan", "green", "yellow", "magenta", "red", "bright_blue", "bright_green", "bright_magenta")
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
    "#994455",
    "#117733",
)
_FULL = 0.9
"""Share of the device from which reductions are shown even if the plan fits."""


def show(plan: MemoryPlan, measured: Mapping[str, Mapping[str, int]], picture: Path | None) -> None:
    """`measured` has the peak of each stage by trace and by probe, where these were run."""
    console, current = Console(highlight=False), plan.current
    console.print(
        f"{current.shape.conditions_per_step} conditions x {current.shape.group_size} members on"
        f" {current.shape.ranks} ranks, device {format_bytes(plan.device_bytes)}; peak"
        f" {format_bytes(current.stages.peak)} in {current.stages.largest_stage} = {current.utilization:.0%}"
        f"{_sharded_over(current)}"
    )
    print_table(_parts_table(current))
    print_table(_settings_table(plan))
    for name, setting in plan.settings.items():
        console.print(_bar(name, setting), soft_wrap=True)
    console.print(_legend(current), soft_wrap=True)
    if current.stages.host:
        console.print(f"\nIn host memory besides, on each rank: {_host_parts(current)}.", soft_wrap=True)
    console.print(f"\n{_explain_group_size(plan)}")
    if plan.reductions and (not plan.fits or current.utilization > _FULL):
        console.print("\nWhat to reduce first, each on top of those before:")
        for number, step in enumerate(plan.reductions, 1):
            console.print(f"  {number}. {step}")
    if current.spec.sharding is not None:
        console.print(f"\nSmallest number of cards: {describe_fewest_ranks(plan)}.")
    nearest = {name: values for name, values in nearest_valid_values(current.shape).items() if values}
    listed = "; ".join(f"{name} {' or '.join(map(str, values))}" for name, values in nearest.items())
    console.print(f"\nNearest values that fit, one changed at a time: {listed}.")
    for source, peaks in measured.items():
        for stage, peak in peaks.items():
            console.print(_compare(source, stage, peak, current))
    if picture is not None:
        console.print(f"Picture: {picture}")


def draw(plan: MemoryPlan, path: Path) -> None:
    """Parts stacked for both stages of the three settings, against the device's memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bars = {
        f"{name}\n{stage}": parts
        for name, setting in plan.settings.items()
        for stage, parts in setting.stages.to_dict().items()
    }
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    bottom = [0.0] * len(bars)
    for index, name in enumerate(names):
        heights = [parts.get(name, 0) / 2**30 for parts in bars.values()]
        color = _CHART_COLORS[index % len(_CHART_COLORS)]
        axes.bar(range(len(bars)), heights, bottom=bottom, width=0.6, color=color, label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    device_gib = plan.device_bytes / 2**30
    axes.axhline(device_gib, color="black", linestyle="--", linewidth=1)
    axes.text(len(bars) - 0.5, device_gib, "device", ha="right", va="bottom", fontsize=9)
    axes.set_xticks(range(len(bars)), list(bars))
    axes.set_ylabel("GiB on each rank")
    axes.set_ylim(0, 1.12 * max(*bottom, device_gib))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path)


def _compare(source: str, stage: str, peak: int, setting: PlannedSetting) -> str:
    parts = setting.stages.to_dict()[stage]
    planned = sum(parts.values()) - parts[FRAMEWORK_PART]
    return (
        f"{source} of the {stage}: {format_bytes(peak)}; planned, without margin: {format_bytes(planned)}"
        f" ({planned / peak - 1:+.1%})"
    )


def _host_parts(setting: PlannedSetting) -> str:
    what = {"checkpoint": "while a checkpoint is written, for the copy that is written", "optimizer": "for the moments"}
    return ", ".join(f"{format_bytes(size)} {what[name]}" for name, size in setting.stages.host.items())


def _explain_group_size(plan: MemoryPlan) -> str:
    growth = {name: peak / plan.current.stages.peak - 1 for name, peak in plan.peak_if_doubled.items()}
    changes = "; ".join(f"twice the {name}: {share:+.1%}" for name, share in growth.items())
    why = "" if max(growth.values()) < 0.02 else ", because more rows are in memory together then"
    return (
        "group_size and conditions_per_step are loops over passes: training needs no more memory for more of them. The"
        f" peak changes ({changes}{why}). They change how many rollouts a step compares, and so its time and the noise"
        " of its gradient. rows_per_pass changes memory and speed, never the result."
    )


def _parts_table(setting: PlannedSetting) -> ReportTable:
    stages = (setting.stages.rollout, setting.stages.update)
    names = dict.fromkeys([*setting.stages.update, *setting.stages.rollout])
    rows = [[name, *(_size(parts.get(name, 0)) for parts in stages)] for name in names]
    peak = ["peak", *(_size(sum(parts.values())) for parts in stages)]
    return ReportTable("Bytes by part, on each rank", ("part", "rollout", "update"), [*rows, [], peak])


def _size(size: int) -> str:
    return format_bytes(size) if size else "-"


def _settings_table(plan: MemoryPlan) -> ReportTable:
    settings = list(plan.settings.values())
    rows = {
        "rows_per_pass": [str(setting.shape.rows_per_pass) for setting in settings],
        "conditions_per_step": [str(setting.shape.conditions_per_step) for setting in settings],
        "group_size": [str(setting.shape.group_size) for setting in settings],
        "memory on each rank": [format_bytes(setting.stages.peak) for setting in settings],
        "of the device": [f"{setting.utilization:.0%}" for setting in settings],
        "rollouts per step": [str(setting.shape.rollouts_per_step) for setting in settings],
        "passes per step": [str(setting.shape.passes) for setting in settings],
        "compared with current": [_difference(setting, plan.current) for setting in settings],
        **_modes(settings),
    }
    return ReportTable("Three settings", ("", *plan.settings), [[name, *cells] for name, cells in rows.items()])


def _modes(settings: Sequence[PlannedSetting]) -> dict[str, list[str]]:
    """What the plan chose where weights are sharded."""
    shardings = [setting.spec.sharding for setting in settings if setting.spec.sharding is not None]
    if not shardings:
        return {}
    rollout = {"whole": "all gathered", "blocks": "block by block"}
    return {
        "weights in rollout": [rollout[sharding.rollout] for sharding in shardings],
        "gradients exchanged": [f"after each {sharding.exchange}" for sharding in shardings],
    }


def _sharded_over(setting: PlannedSetting) -> str:
    sharding = setting.spec.sharding
    if sharding is None:
        return ""
    copies = setting.shape.ranks // sharding.ranks
    return f"; sharded over {sharding.ranks} ranks" + (f", {copies} copies" if copies > 1 else "")


def _difference(setting: PlannedSetting, current: PlannedSetting) -> str:
    """How many passes fewer or more the same rollouts take, and how many more groups a step has."""
    growth = setting.shape.conditions_per_step // current.shape.conditions_per_step
    fewer = current.shape.passes * growth / setting.shape.passes
    passes = "" if fewer == 1 else f"{fewer:.3g}x fewer passes" if fewer > 1 else f"{1 / fewer:.3g}x more passes"
    groups = f"{growth}x the groups" if growth > 1 else ""
    return ", ".join(filter(None, (passes, groups))) or "-"


def _bar(name: str, setting: PlannedSetting) -> Text:
    """Parts side by side, up to the size of the device; what does not fit goes beyond it."""
    parts = setting.stages.to_dict()[setting.stages.largest_stage]
    full, text = max(setting.device_bytes, setting.stages.peak), Text(f"{name:<12}")
    width = used = 0
    for index, size in enumerate(parts.values()):
        used += size
        end = round(_BAR_WIDTH * used / full)
        text.append("█" * (end - width), style=_BAR_COLORS[index % len(_BAR_COLORS)])
        width = max(width, end)
    text.append("░" * (_BAR_WIDTH - width))
    text.append(f" {setting.utilization:.0%}" + ("" if setting.fits else "  does not fit"))
    return text


def _legend(setting: PlannedSetting) -> Text:
    text = Text(" " * 12)
    for index, name in enumerate(setting.stages.to_dict()[setting.stages.largest_stage]):
        text.append("█ ", style=_BAR_COLORS[index % len(_BAR_COLORS)]).append(f"{name}  ")
    return text
