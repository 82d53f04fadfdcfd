import itertools
import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.report.charts import bar_chart, line_chart, nice_ticks, running_mean


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 0.5, 1]), (0.72, 0.74, [0.72, 0.725, 0.73, 0.735, 0.74]), (-3, 9, [-5, 0, 5, 10])],
)
def test_ticks_are_round_numbers_by_hand(low: float, high: float, ticks: list[float]):
    assert nice_ticks(low, high) == pytest.approx(ticks)


@given(
    st.floats(-1e6, 1e6, allow_nan=False).flatmap(lambda low: st.tuples(st.just(low), st.floats(1e-3, 1e6))),
)
def test_ticks_enclose_the_range_evenly(low_and_width: tuple[float, float]):
    low, high = low_and_width[0], sum(low_and_width)
    ticks = nice_ticks(low, high)
    steps = [after - before for before, after in itertools.pairwise(ticks)]
    tolerance = 1e-6 * max(steps)
    assert ticks[0] <= low + tolerance
    assert ticks[-1] >= high - tolerance
    assert 2 <= len(ticks) <= 7
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)


def test_a_line_runs_from_corner_to_corner():
    svg = ElementTree.fromstring(line_chart({"reward": [(1, 0.0), (2, 0.5), (3, 1.0)]}))
    line, _ = svg.findall("polyline")
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert points == [(52, 148), (192, 78), (332, 8)]  # the plot is 280 wide and 140 high
    assert [dot.findtext("title") for dot in svg.findall("circle")] == [
        "reward, step 1: 0",
        "reward, step 2: 0.5",
        "reward, step 3: 1",
    ]


def test_the_running_mean_by_hand():
    line = [(1, 2.0), (2, 4.0), (3, 9.0), (4, 1.0)]
    assert running_mean(line, 1) == [(1, 2.0), (2, 3.0), (3, 6.5), (4, 5.0)]
    assert running_mean(line, 0) == line


@pytest.mark.parametrize(
    "values", [[0.0, 0.0], [7.0], [-2.5, -2.5], [1e-9, 1e9], [5e-324, 1e-323], [1e15, 1e15 + 0.125], [9e299, -9e299]]
)
def test_a_line_that_is_flat_or_one_point_is_drawn(values: list[float]):
    svg = ElementTree.fromstring(line_chart({"loss": list(enumerate(values))}))
    for pair in svg.find("polyline").attrib["points"].split():
        assert all(math.isfinite(number) for number in map(float, pair.split(",")))


def test_bars_are_as_long_as_their_bytes():
    drawn = bar_chart({"now": {"weights": 1.0, "cache": 3.0}, "more": {"weights": 8.0}}, 8.0, "device", "GiB")
    svg = ElementTree.fromstring(drawn[: drawn.index("</svg>") + 6])
    widths = [float(bar.attrib["width"]) for bar in svg.findall("rect")]
    assert widths == pytest.approx([62.5, 187.5, 500])  # the axis is 500 wide for 8 GiB
    limit = svg.find("line").attrib["x1"]
    assert float(limit) == pytest.approx(150 + 500)
