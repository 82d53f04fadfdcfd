"""The picture of a plan: parts stacked for the three settings, against the device's memory."""

from __future__ import annotations

from pathlib import Path

from groupwise.plan.plan import Plan

_COLOURS = (
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


def draw(plan: Plan, path: Path) -> None:
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
        axes.bar(range(len(bars)), heights, bottom=floor, width=0.6, color=_COLOURS[nth % len(_COLOURS)], label=name)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    axes.axhline(plan.device / 2**30, color="black", linestyle="--", linewidth=1)
    axes.text(len(bars) - 0.5, plan.device / 2**30, "device", ha="right", va="bottom", fontsize=9)
    axes.set_xticks(range(len(bars)), [label for label, _ in bars])
    axes.set_ylabel("GiB on each rank")
    axes.set_ylim(0, 1.12 * max(*floor, plan.device / 2**30))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(path)
