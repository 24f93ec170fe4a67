"""The pace of each GPU as bars: who works all the time, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trainwright.estimate.figures import StepTime

_WIDTH: Final = 20
_WAITS_BELOW: Final = 0.98


def busy_bars(time: StepTime, names: Sequence[str]) -> list[str]:
    """A line for each GPU: the share of a step in which it computes and does not wait for the slowest."""
    slowest, width = max(time.ranks_s), max(map(len, names))
    lines = []
    for name, seconds in zip(names, time.ranks_s, strict=True):
        busy = seconds / slowest
        lines.append(f"{name:<{width}} [{'#' * max(1, round(_WIDTH * busy)):<{_WIDTH}}] {busy:4.0%} busy")
    return lines


def pace_bars(time: StepTime, names: Sequence[str]) -> list[str]:
    """A line for each GPU: the share of its speed that the set can use, and what the set is worth (S0-08, S0-09).

    The slowest GPU sets the pace, as all must synchronise at every step; the others wait for it.
    """
    slowest = max(time.ranks_s)
    fastest = min(time.ranks_s)
    even = fastest >= _WAITS_BELOW * slowest
    width = max(map(len, names))
    lines = []
    for name, seconds in zip(names, time.ranks_s, strict=True):
        speed = fastest / seconds
        busy = seconds / slowest
        bar = "#" * max(1, round(_WIDTH * speed))
        if even:
            said = ""
        elif busy < _WAITS_BELOW:
            said = f"  waits {1 - busy:.0%} of each step for the slowest"
        else:
            said = "  bottleneck"
        lines.append(f"{name:<{width}} [{bar:<{_WIDTH}}] {speed:4.0%}{said}")
    if not even:
        worth = sum(fastest / slowest for _ in time.ranks_s)
        lines.append(
            f"all GPUs must synchronise: speed = slowest x {len(time.ranks_s)} = that of {worth:.1f} of the fastest GPU"
        )
    return lines
