"""The HTML page: results, curves, planned and measured memory, images, rollouts, settings."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from groupwise.core.units import format_bytes
from groupwise.report.charts import Points, bar_chart, legend, line_chart
from groupwise.report.run_data import RunData, held_out_series, metric_series

_MAIN = ("reward", "zero_spread_share", "entropy", "kl", "ratio_max", "clip_fraction", "grad_norm", "learning_rate")
_UNITS = {"_s": "seconds, measured", "_share": "share", "_fraction": "share"}
_MAX_SAMPLES = 12
_MIN_EVALUATIONS = 3
_STYLE = """
:root{color-scheme:light dark;--ink:#222;--soft:#777;--line:#ddd;--card:#fff;--page:#f6f6f4}
@media(prefers-color-scheme:dark){:root{--ink:#e8e8e8;--soft:#999;--line:#444;--card:#242424;--page:#181818}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1120px;
margin:2em auto;padding:0 1em}
h1{font-size:1.5em}h2{font-size:1.15em;margin:2em 0 .6em}h3{font-size:.95em;margin:0;font-weight:600}
small,.unit{color:var(--soft);font-weight:400}
.cards{display:grid;column-gap:12px;grid-template-columns:repeat(auto-fill,minmax(320px,1fr))}
.card{margin-bottom:12px;background:var(--card);border:1px solid var(--line);border-radius:6px;
padding:10px 12px;overflow-x:auto}
svg{width:100%;height:auto;font-size:10px}svg text{fill:var(--soft)}.grid{stroke:var(--line)}
.faint{opacity:.35}.bold{stroke-width:1.6}.limit{stroke:var(--ink);stroke-dasharray:4 3}
table{border-collapse:collapse;font-size:.88em}
td,th{padding:3px 10px 3px 0;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
td{white-space:pre-wrap;overflow-wrap:break-word;max-width:22em}
.legend span{margin-right:1.2em;font-size:.85em}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
img{max-width:100%;background:#fff}pre{overflow-x:auto;font-size:.85em}
summary{cursor:pointer;margin:1em 0 .6em}"""


def render(runs: Sequence[RunData]) -> str:
    """One self-contained HTML page about one run, or about several side by side."""
    names = [run.name for run in runs]
    sections = [
        _section("Results", _results(runs)),
        _section("Curves", legend(names) if len(runs) > 1 else "", *_curves(runs)),
        *(_section(f"Held-out{_run_label(run, runs)}", chart) for run in runs if (chart := _held_out(run))),
        *(_section(f"Memory{_run_label(run, runs)}", _memory(run)) for run in runs),
        *(_section(f"Images{_run_label(run, runs)}", _images(run)) for run in runs if run.images),
        *(_section(f"Rollouts of the last step{_run_label(run, runs)}", _samples(run)) for run in runs if run.samples),
        *(_section(f"Settings{_run_label(run, runs)}", _settings(run)) for run in runs),
    ]
    title = escape(", ".join(names))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>{''.join(sections)}</body></html>\n"
    )


def _section(title: str, *parts: str) -> str:
    return f"<h2>{escape(title)}</h2>{''.join(parts)}"


def _run_label(run: RunData, runs: Sequence[RunData]) -> str:
    return f": {run.name}" if len(runs) > 1 else ""


def _results(runs: Sequence[RunData]) -> str:
    rows = []
    for run in runs:
        seconds = sum(entry.get(f"{stage}_s", 0.0) for entry in run.steps for stage in ("rollout", "reward", "update"))
        rows.append([run.name, "steps", "", str(len(run.steps))])
        rows.append([run.name, "time of the steps, measured", "", f"{seconds:.0f} s"])
        before, after = run.evaluation.get("before", {}), run.evaluation.get("after", {})
        for name in dict.fromkeys([*before, *after]):
            rows.append([run.name, name, _number(before.get(name)), _number(after.get(name))])
    skipped = 0 if len(runs) > 1 else 1
    return _table(["run", "metric", "before", "after"][skipped:], [row[skipped:] for row in rows])


def _curves(runs: Sequence[RunData]) -> list[str]:
    by_run = {run.name: metric_series(run) for run in runs}
    names = list(dict.fromkeys(name for series in by_run.values() for name in series))
    names = [name for name in names if not name.startswith("memory,")]
    first = [name for name in names if name in _MAIN or (name.startswith("reward/") and name.count("/") == 1)]
    rest = [name for name in names if name not in first]

    def card(name: str) -> str:
        lines = {run: series[name] for run, series in by_run.items() if name in series}
        return _card(name, next((unit for end, unit in _UNITS.items() if name.endswith(end)), ""), line_chart(lines))

    more = f"<details><summary>{len(rest)} more</summary>{_cards(rest, card)}</details>" if rest else ""
    return [_cards(first, card), more]


def _held_out(run: RunData) -> str:
    """Metrics that were evaluated during training, too: those from 0 to 1 on the same axes, so that a judge that parts
    from the reward is seen."""
    series = {name: line for name, line in held_out_series(run).items() if len(line) >= _MIN_EVALUATIONS}
    shares = {name: line for name, line in series.items() if all(0 <= value <= 1 for _, value in line)}
    cards = [_card("metrics from 0 to 1", "", line_chart(shares) + legend(list(shares)))] if shares else []
    cards += [_card(name, "", line_chart({name: line})) for name, line in series.items() if name not in shares]
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _memory(run: RunData) -> str:
    lines: dict[str, Points] = {
        name.removeprefix("memory, "): points
        for name, points in metric_series(run).items()
        if name.startswith("memory,")
    }
    parts = []
    if lines:
        named = {f"{name}, {'planned' if name == 'predicted' else 'measured'}": line for name, line in lines.items()}
        card = _card("Highest peak memory of any rank", "GiB", line_chart(named) + legend(list(named)))
        parts.append(f'<div class="cards">{card}</div>')
    last = run.steps[-1]["memory_bytes"]
    if {"peak", "predicted", "prediction_error", "utilization"} <= set(last):
        parts.append(
            f"<p>Last step: {format_bytes(int(last['peak']))} measured, {format_bytes(int(last['predicted']))} planned"
            f" (error {last['prediction_error']:+.1%}), {last['utilization']:.1%} of the device.</p>"
        )
    if run.plan:
        bars = {
            f"{setting}, {stage}": {name: size / 2**30 for name, size in planned["parts"][stage].items()}
            for setting, planned in run.plan["settings"].items()
            for stage in ("rollout", "update")
        }
        chart = bar_chart(bars, run.plan["device_bytes"] / 2**30, "device", "GiB")
        parts.append(_card("Memory plan by part", "GiB on each rank, estimated before the run", chart))
    return "".join(parts) or "<p>No memory data.</p>"


def _images(run: RunData) -> str:
    cards = []
    for name, content in run.images.items():
        data, image_type = base64.b64encode(content).decode(), name.rpartition(".")[2]
        image = f'<img alt="{escape(name)}" src="data:image/{image_type};base64,{data}">'
        cards.append(_card(name, "", image))
    return "".join(cards)


def _samples(run: RunData) -> str:
    last = run.samples[-1]["step"]
    shown = [sample for sample in run.samples if sample["step"] == last][:_MAX_SAMPLES]
    columns = list(dict.fromkeys(name for sample in shown for name in sample if name != "step"))
    return f'<div class="card">{_table(columns, [[_cell(s.get(name)) for name in columns] for s in shown])}</div>'


def _settings(run: RunData) -> str:
    text = escape(json.dumps(run.config, indent=1))
    return f"<details><summary>config.json</summary><pre>{text}</pre></details>"


def _cards(names: Sequence[str], card: Callable[[str], str]) -> str:
    return f'<div class="cards">{"".join(card(name) for name in names)}</div>'


def _card(title: str, unit: str, content: str) -> str:
    return f'<div class="card"><h3>{escape(title)} <span class="unit">{escape(unit)}</span></h3>{content}</div>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return "  ".join(f"{name} {_cell(entry)}" for name, entry in value.items())
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
