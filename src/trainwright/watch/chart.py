"""A curve in the dots of Braille characters, two wide and four high in each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from trainwright.watch.view import Points

BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Unicode, Braille Patterns: the bit of each dot, from top to bottom, left and right."""


def chart(points: Points, width: int, height: int, spec: str = ".4g") -> list[str]:
    """Return `height` lines of at most `width` characters: the range of values at the left, the curve beside it."""
    if not points or width < 16 or height < 2:
        return []
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = [f"{high:{spec}}", *[""] * (height - 2), f"{low:{spec}}"]
    margin = max(map(len, labels))
    cells = _cells(points, width - margin - 1, height, low, high)
    return [
        f"{label:>{margin}} {''.join(chr(BLANK + cell) for cell in row)}"
        for label, row in zip(labels, cells, strict=True)
    ]


def _cells(points: Points, width: int, height: int, low: float, high: float) -> list[list[int]]:
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column, value in enumerate(_by_column(points, 2 * width)):
        if value is None:
            continue
        share = (value - low) / (high - low) if high > low else 0.5
        dot = round((1 - share) * (4 * height - 1))
        # Up or down from the column before, so that the eye can follow.
        for line in range(min(dot, dot if before is None else before), max(dot, before or 0) + 1):
            cells[line // 4][column // 2] |= _DOTS[line % 4][column % 2]
        before = dot
    return cells


def _by_column(points: Points, columns: int) -> Sequence[float | None]:
    """Return the mean of the points that fall in each column, and between two of them a straight line."""
    first, last = points[0][0], points[-1][0]
    sums = [(0.0, 0)] * columns
    for x, y in points:
        column = int((x - first) / (last - first) * (columns - 1)) if last > first else 0
        total, count = sums[column]
        sums[column] = total + y, count + 1
    values = [total / count if count else None for total, count in sums]
    known = [column for column, value in enumerate(values) if value is not None]
    for left, right in pairwise(known):
        begin, end = values[left], values[right]
        assert begin is not None and end is not None
        for column in range(left + 1, right):
            values[column] = begin + (end - begin) * (column - left) / (right - left)
    return values
