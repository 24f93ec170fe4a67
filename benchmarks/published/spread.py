"""The spread of errors by slice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

ALWAYS = ("full", "lora", "qlora", "sharded", "all")
"""Slices that are given first, if they have rows."""


def spread(named_errors: Iterable[tuple[Iterable[str], float]]) -> list[dict[str, Any]]:
    """Return rows, median, 95th percentile (nearest rank) and share under-predicted by over 5 % of each slice.

    An error in percent belongs to the slices it is named with.
    """
    slices: dict[str, list[float]] = {}
    for names, error in named_errors:
        for name in names:
            slices.setdefault(name, []).append(error)
    order = [*ALWAYS, *sorted(slices.keys() - set(ALWAYS))]
    return [{"name": name, **_figures(slices[name])} for name in order if name in slices]


def _figures(errors: Sequence[float]) -> dict[str, Any]:
    ranked = sorted(abs(error) for error in errors)
    return {
        "rows": len(errors),
        "median_abs_pct": median(ranked),
        "p95_abs_pct": ranked[math.ceil(0.95 * len(ranked)) - 1],
        "under_5_pct_share": sum(error < -5 for error in errors) / len(errors),
    }
