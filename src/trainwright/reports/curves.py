"""A curve of any length in bounded memory, that loses no peak: stretches of it with their lowest, mean and highest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

MOST_STRETCHES: Final = 480
"""Twice as many pixels as a plot of a phone is wide; there are at least half as many in a curve that has them."""


@dataclass(frozen=True, slots=True)
class CurveBucket:
    """Some values that follow each other, at `x` in their middle; a single one is its own lowest, mean and highest."""

    x: float
    low: float
    mean: float
    high: float


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot: its stretches, and the first and the last value themselves."""

    name: str
    stretches: tuple[CurveBucket, ...]
    first: float
    last: float

    @property
    def low(self) -> float:
        """Lowest value."""
        return min(stretch.low for stretch in self.stretches)

    @property
    def high(self) -> float:
        """Highest value."""
        return max(stretch.high for stretch in self.stretches)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; a point is [x, lowest, mean, highest]."""
        points = [[stretch.x, stretch.low, stretch.mean, stretch.high] for stretch in self.stretches]
        return {"name": self.name, "first": self.first, "last": self.last, "points": points}


class _Open:
    __slots__ = ("begin", "count", "end", "first", "high", "last", "low", "total")

    def __init__(self, x: float, y: float) -> None:
        self.begin = self.end = x
        self.first = self.last = self.low = self.high = self.total = y
        self.count = 1


class Curve:
    """Takes values in the order of x."""

    __slots__ = ("_open", "_span")

    def __init__(self) -> None:
        self._open: list[_Open] = []
        self._span = 1

    def add(self, x: float, y: float) -> None:
        """Take the next value."""
        self.extend((x,), (y,))

    def extend(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        """Take the next values; many at once cost much less than one after the other."""
        done = 0
        while done < len(ys):
            last = self._open[-1] if self._open else None
            if last is None or last.count >= self._span:
                if len(self._open) >= MOST_STRETCHES:
                    self._join_pairs()
                self._open.append(_Open(xs[done], ys[done]))
                done += 1
                continue
            part = ys[done : done + self._span - last.count]
            done += len(part)
            last.end, last.last = xs[done - 1], part[-1]
            last.total += sum(part)
            last.count += len(part)
            last.low, last.high = min(last.low, *part), max(last.high, *part)

    def rewind(self, x: float) -> None:
        """Forget what lies at or after x, as it was done again; a stretch that began before stays whole."""
        while self._open and self._open[-1].begin >= x:
            self._open.pop()

    def series(self, name: str) -> Series | None:
        """Return the curve so far, None before its first value."""
        if not self._open:
            return None
        stretches = tuple(
            CurveBucket((part.begin + part.end) / 2, part.low, part.total / part.count, part.high)
            for part in self._open
        )
        return Series(name, stretches, self._open[0].first, self._open[-1].last)

    def _join_pairs(self) -> None:
        joined = self._open[::2]
        for left, right in zip(joined, self._open[1::2], strict=False):
            left.end, left.last = right.end, right.last
            left.total += right.total
            left.count += right.count
            left.low, left.high = min(left.low, right.low), max(left.high, right.high)
        self._open = joined
        self._span *= 2
