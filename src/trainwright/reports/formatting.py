"""Figures of a report as people read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from trainwright.watch import formatting

_SPELLINGS: Final[dict[str, Callable[[Any], str]]] = {
    "text": str,
    "count": lambda value: f"{value:,}",
    "bytes": lambda value: f"{value / 2**30:.2f} GiB",
    "pct": lambda value: f"{value:.1f} %",
    "s": lambda value: f"{value:.4g} s" if value < 1000 else formatting.duration(value),
    "duration": formatting.duration,
    "rate": lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}",
    "ratio": lambda value: f"{value:.2f}x",
    "loss": lambda value: f"{value:.4f}",
    "moment": formatting.date_and_clock,
}


def spelled(kind: str, value: Any) -> str:
    """Return a value as text, with its unit where it has one; None is `n/a`, not available."""
    return formatting.NOT_AVAILABLE if value is None else _SPELLINGS[kind](value)
