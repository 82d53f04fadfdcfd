"""Line and bar charts as inline SVG: they scale with the page, follow its colors, and need no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import accumulate

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99", "#999999", "#223355")
_WIDTH, _HEIGHT = 340, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 8, 8, 22
_MAX_DOTS = 60
_SMALLEST = 1e-290
Points = Sequence[tuple[float, float]]
ToPixels = Callable[[float, float], tuple[float, float]]


def line_chart(series: Mapping[str, Points]) -> str:
    """One faint line per name and its running mean, on the same axes; hovering over a line shows the value."""
    points = [point for line in series.values() for point in line]
    low_x, high_x = _range([x for x, _ in points])
    ticks = nice_ticks(*_range([y for _, y in points]))
    low_y, high_y = ticks[0], ticks[-1]

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / (high_x - low_x)
        up = (y - low_y) / (high_y - low_y)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    elements = [_grid_line(to_pixels(low_x, tick)[1], tick) for tick in ticks]
    elements += [_step_label(to_pixels(x, low_y)[0], x) for x in (low_x, high_x)]
    for index, (name, line) in enumerate(series.items()):
        elements.append(_line(name, line, COLORS[index % len(COLORS)], to_pixels))
    return _svg(_WIDTH, _HEIGHT, elements)


def _line(name: str, line: Points, color: str, to_pixels: ToPixels) -> str:
    points = [to_pixels(x, y) for x, y in line]
    smooth = [to_pixels(x, y) for x, y in running_mean(line, max(1, len(line) // 20))]
    stride = math.ceil(len(line) / _MAX_DOTS)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="transparent">'
        f"<title>{escape(name)}, step {step:g}: {value:.5g}</title></circle>"
        for (x, y), (step, value) in [*zip(points, line, strict=True)][::stride]
    )
    return _path(points, color, "faint") + _path(smooth, color, "bold") + dots


def _path(points: Points, color: str, css_class: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" class="{css_class}"/>'


def running_mean(line: Points, window: int) -> list[tuple[float, float]]:
    """The mean of each value and of up to `window` values before it."""
    sums = [0.0, *accumulate(value for _, value in line)]
    first = [max(0, index - window) for index in range(len(line))]
    return [
        (x, (sums[index + 1] - sums[start]) / (index + 1 - start))
        for index, ((x, _), start) in enumerate(zip(line, first, strict=True))
    ]


def bar_chart(bars: Mapping[str, Mapping[str, float]], limit: float, limit_name: str, unit: str) -> str:
    """One stacked bar per name, and a line at the limit."""
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    left, row, width = 150, 26, 720
    scale = (width - left - 70) / max(limit, *(sum(parts.values()) for parts in bars.values()))
    elements = []
    for index, (title, parts) in enumerate(bars.items()):
        top, x = 6 + index * row, float(left)
        elements.append(f'<text x="{left - 8}" y="{top + 13}" text-anchor="end">{escape(title)}</text>')
        for name, value in parts.items():
            color = COLORS[names.index(name) % len(COLORS)]
            elements.append(
                f'<rect x="{x:.2f}" y="{top}" width="{value * scale:.2f}" height="18" fill="{color}">'
                f"<title>{escape(name)}: {value:.4g} {unit}</title></rect>"
            )
            x += value * scale
        elements.append(f'<text x="{x + 5:.1f}" y="{top + 13}">{sum(parts.values()):.3g} {unit}</text>')
    bottom, at = 6 + len(bars) * row, left + limit * scale
    elements.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{bottom}" class="limit"/>')
    elements.append(f'<text x="{at:.1f}" y="{bottom + 12}" text-anchor="end">{escape(limit_name)}</text>')
    return _svg(width, bottom + 18, elements) + legend(names)


def legend(names: Sequence[str]) -> str:
    """The color of each name, in the order in which charts assign them."""
    entries = [
        f'<span><i style="background:{COLORS[index % len(COLORS)]}"></i>{escape(name)}</span>'
        for index, name in enumerate(names)
    ]
    return f'<p class="legend">{"".join(entries)}</p>'


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers that enclose the range, spaced by 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Wide enough to be divided: what differs in the last digits alone, or by next to nothing, is drawn as flat."""
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    if high - low <= 1e-12 * size or size < _SMALLEST:
        margin = size / 2 if size >= _SMALLEST else 1.0
        low, high = low - margin, high + margin
    return low, high


def _grid_line(y: float, value: float) -> str:
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{value:.4g}</text>'
    )


def _step_label(x: float, step: float) -> str:
    anchor = "start" if x <= _LEFT else "end"
    return f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">step {step:g}</text>'


def _svg(width: int, height: int, elements: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(elements)}</svg>'
