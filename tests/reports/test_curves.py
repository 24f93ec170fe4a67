"""A curve of any length: bounded, without loss of peaks, and as it was done last."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.reports.curves import MOST_STRETCHES, Curve
from trainwright.reports.drawing import draw
from trainwright.reports.plots import Plot


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5000),
    st.lists(st.integers(1, 700), min_size=1, max_size=5),
)
def test_whatever_the_length_the_extremes_and_the_mean_remain(values: list[float], portions: list[int]) -> None:
    """Issue 7, report: bounded points per plot, and peaks remain; in whatever portions they come."""
    curve, done, turn = Curve(), 0, 0
    while done < len(values):
        portion = values[done : done + portions[turn % len(portions)]]
        curve.extend(range(done, done + len(portion)), portion)
        done, turn = done + len(portion), turn + 1
    series = curve.series("y")
    assert series is not None and len(series.stretches) <= MOST_STRETCHES
    assert (series.low, series.high) == (min(values), max(values))
    assert (series.first, series.last) == (values[0], values[-1])
    assert all(s.low - 1e-6 <= s.mean <= s.high + 1e-6 for s in series.stretches)
    assert [s.x for s in series.stretches] == sorted(s.x for s in series.stretches)


def test_a_short_curve_is_every_value_itself() -> None:
    curve = Curve()
    curve.extend([1, 2, 3], [5.0, 4.0, 6.0])
    series = curve.series("y")
    assert series is not None
    assert [(s.x, s.low, s.mean, s.high) for s in series.stretches] == [(1, 5, 5, 5), (2, 4, 4, 4), (3, 6, 6, 6)]


def test_what_is_done_again_replaces_what_was_done_before() -> None:
    curve = Curve()
    curve.extend([1, 2, 3], [5.0, 4.0, 9.0])
    curve.rewind(2)
    curve.add(2, 3.0)
    series = curve.series("y")
    assert series is not None and [(s.x, s.mean) for s in series.stretches] == [(1, 5.0), (2, 3.0)]
    assert Curve().series("y") is None


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.0], [0.0, 0.0], [1e-9, 3e-9], [-5.0, 12345678.0]])
def test_every_curve_can_be_drawn(values: list[float]) -> None:
    curve = Curve()
    curve.extend(list(range(1, len(values) + 1)), values)
    series = curve.series("y")
    assert series is not None
    drawing = draw(Plot(name="y", title="Y", unit="", axis="step", series=(series,)), None)
    points = [tuple(map(float, point.split(","))) for point in drawing.lines[0].points.split()]
    assert len(points) == len(values) and all(0 <= x <= 640 and 0 <= y <= 220 for x, y in points)
    assert drawing.y_ticks and drawing.strips
