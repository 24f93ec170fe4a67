"""A plot as the coordinates of an SVG: axes, lines with their bands, and a text for each place under the pointer.

Drawn here and not by matplotlib: its SVG carries colours in style attributes, which a strict content security policy
refuses, and which follow neither a dark screen nor a printer; and a report needs nothing but the core dependencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from trainwright.reports.curves import CurveBucket, Series
from trainwright.reports.plots import Plot

WIDTH: Final = 640
HEIGHT: Final = 220
LEFT, RIGHT, TOP, BOTTOM = 64, 22, 10, 26
PLACES: Final = 48
"""Strips of a plot that tell their values under the pointer."""
_TIME_UNITS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass(frozen=True)
class Tick:
    """A mark of an axis, at a coordinate of the drawing."""

    at: float
    label: str


@dataclass(frozen=True)
class Line:
    """One curve: the points of its mean, and of the outline from its lowest to its highest where these differ."""

    name: str
    points: str
    band: str
    is_point: bool
    in_words: str
    """First, last, lowest and highest in words."""


@dataclass(frozen=True)
class Strip:
    """A place of the plot and what stands there."""

    x: float
    width: float
    text: str


@dataclass(frozen=True)
class Drawing:
    """Everything that an SVG of WIDTH x HEIGHT needs."""

    title: str
    unit: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_title: str
    lines: tuple[Line, ...]
    strips: tuple[Strip, ...]


def draw(plot: Plot, began_s: float | None) -> Drawing:
    """Return the drawing of a plot; times are counted from `began_s`."""
    stretches = [stretch for series in plot.series for stretch in series.stretches]
    low_x, high_x = min(stretch.x for stretch in stretches), max(stretch.x for stretch in stretches)
    low_y, high_y = _range(min(stretch.low for stretch in stretches), max(stretch.high for stretch in stretches))
    origin = low_x if began_s is None else min(low_x, began_s)
    scale, x_unit = (1.0, "") if plot.axis == "step" else _time_unit(high_x - origin)
    if plot.axis == "step":
        origin = 0.0

    def x_of(x: float) -> float:
        share = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y_of(y: float) -> float:
        share = (y - low_y) / (high_y - low_y)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def place(x: float) -> str:
        return f"step {x:,.0f}" if plot.axis == "step" else f"{figure((x - origin) / scale)} {x_unit}"

    x_ticks = _ticks((low_x - origin) / scale, (high_x - origin) / scale, 7, whole=plot.axis == "step")
    return Drawing(
        title=plot.title,
        unit=plot.unit,
        x_ticks=tuple(Tick(x_of(value * scale + origin), figure(value)) for value in x_ticks),
        y_ticks=tuple(Tick(y_of(value), figure(value)) for value in _ticks(low_y, high_y, 4)),
        x_title="step" if plot.axis == "step" else f"{x_unit} since the run began",
        lines=tuple(_line(series, x_of, y_of, plot.unit) for series in plot.series),
        strips=tuple(_strips(plot.series, x_of, place, plot.unit)),
    )


def figure(value: float) -> str:
    """Return a number as short as it can be read: 12,345 or 0.0001234."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _line(series: Series, x_of: Callable[[float], float], y_of: Callable[[float], float], unit: str) -> Line:
    upper = [f"{x_of(stretch.x)},{y_of(stretch.high)}" for stretch in series.stretches]
    lower = [f"{x_of(stretch.x)},{y_of(stretch.low)}" for stretch in reversed(series.stretches)]
    has_band = any(stretch.high > stretch.low for stretch in series.stretches)
    of = f" {unit}" if unit else ""
    return Line(
        name=series.name,
        points=" ".join(f"{x_of(stretch.x)},{y_of(stretch.mean)}" for stretch in series.stretches),
        band=" ".join([*upper, *lower]) if has_band else "",
        is_point=len(series.stretches) == 1,
        in_words=f"{figure(series.first)} at first, {figure(series.last)} at last, "
        f"{figure(series.low)} to {figure(series.high)}{of}",
    )


def _strips(
    all_series: Sequence[Series], x_of: Callable[[float], float], place: Callable[[float], str], unit: str
) -> Iterator[Strip]:
    width = (WIDTH - LEFT - RIGHT) / PLACES
    by_strip: list[list[tuple[str, CurveBucket]]] = [[] for _ in range(PLACES)]
    for series in all_series:
        for stretch in series.stretches:
            index = min(PLACES - 1, int((x_of(stretch.x) - LEFT) / width))
            by_strip[index].append((series.name, stretch))
    for index, stretches in enumerate(by_strip):
        if stretches:
            in_words = [
                _stretches_in_words(name, [s for n, s in stretches if n == name], unit)
                for name in dict.fromkeys(n for n, _ in stretches)
            ]
            where = dict.fromkeys((place(stretches[0][1].x), place(stretches[-1][1].x)))
            yield Strip(round(LEFT + index * width, 1), round(width, 1), f"{' to '.join(where)}: {'; '.join(in_words)}")


def _stretches_in_words(name: str, stretches: Sequence[CurveBucket], unit: str) -> str:
    low, high = min(stretch.low for stretch in stretches), max(stretch.high for stretch in stretches)
    values = figure(low) if figure(low) == figure(high) else f"{figure(low)} to {figure(high)}"
    return f"{name} {values}{unit and ' ' + unit}"


def _range(low: float, high: float) -> tuple[float, float]:
    """Return what the axis spans: from 0 on where that costs less than half the height."""
    if low >= 0 and low <= high / 2:
        low = 0.0
    if low == high:
        return low - (abs(low) or 1.0) / 10, high + (abs(high) or 1.0) / 10
    return low, high


def _time_unit(span_s: float) -> tuple[float, str]:
    return next(((seconds, name) for seconds, name in _TIME_UNITS if span_s >= 3 * seconds), (1.0, "s"))


def _ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return round values within a range, about `most` of them."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    step = max(1.0, step) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]
