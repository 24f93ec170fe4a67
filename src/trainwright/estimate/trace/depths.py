"""The peak of a deep model from two short ones with the same layers.

What a step holds at a given point grows by the same amount with every layer, but which point is the highest may change
with depth. So the line is continued for every point by itself (each phase and operator: its first, last and highest),
and the maximum is taken afterwards. Reserved memory does not follow a line and is not given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from trainwright.errors import UserError
from trainwright.estimate.request import Request
from trainwright.estimate.trace.model import build_config
from trainwright.estimate.trace.peaks_report import in_order, part_of_each, training_records
from trainwright.estimate.trace.run import Run, prepare, trace
from trainwright.estimate.trace.tracker import Record, TracePhase

SHALLOWEST = 3
"""The first and the last layer differ from those between in what is alive around them."""

Point = tuple[TracePhase, str, str]
Parts = dict[str, int]


def two_depths(request: Request, versions: dict[str, str]) -> dict[str, Any]:
    """Trace two short models and continue to the full depth.

    Raises:
        UserError: the model has too few layers for two shorter ones.
    """
    prepare()
    config = build_config(request)
    full = config.num_hidden_layers
    low, high = depths(full, getattr(config, "layer_types", None))
    short, longer = trace(request, layers=low), trace(request, layers=high)
    at_low, at_high = _points(short), _points(longer)
    continued = {
        point: _continue(at_low[point], at_high[point], low, high, full) for point in at_high if point in at_low
    }
    point = max(continued, key=lambda p: sum(continued[p].values()))
    phase, operator, _ = point
    return {
        "schema_version": 1,
        "versions": versions,
        "parameters": _continue(short.parameters, longer.parameters, low, high, full),
        "static_bytes": _line(short.static_bytes, longer.static_bytes, low, high, full),
        "depths": {"traced": [low, high], "full": full},
        "peak": {
            "allocated_bytes": sum(continued[point].values()),
            "reserved_bytes": None,
            "phase": phase.name,
            "step": phase.step,
            "operator": operator,
            "parts_bytes": in_order(Counter(continued[point])),
        },
        "attention_kernels": longer.attention,
        "operators": short.tracker.operators + longer.tracker.operators,
    }


def depths(full: int, layer_types: Sequence[str] | None) -> tuple[int, int]:
    """Return two depths that end in the same place of the pattern of layers as the full model."""
    period = _period(layer_types or [])
    low = full % period
    while low < SHALLOWEST:
        low += period
    if low + period >= full:
        raise UserError(
            f"two_depths: {full} layers with a pattern of {period} are too few to be continued from two short models",
            hints=["two_depths=false traces all of them"],
        )
    return low, low + period


def _period(pattern: Sequence[str]) -> int:
    for period in range(1, len(pattern)):
        if all(pattern[i] == pattern[i - period] for i in range(period, len(pattern))):
            return period
    return max(1, len(pattern))


def _points(run: Run) -> dict[Point, Parts]:
    records = training_records(run.tracker)
    parts = part_of_each(run.tracker, records)
    now: Counter[str] = Counter()
    found: dict[Point, Parts] = {}
    highest: dict[tuple[TracePhase, str], int] = {}
    total = 0
    for record in records:
        total += record.size_bytes
        now[parts[record.key]] += record.size_bytes
        place = (record.phase, record.operator)
        if not _counts(record):
            continue
        if place not in highest:
            found[(*place, "first")] = dict(now)
        if total > highest.get(place, -1):
            highest[place] = total
            found[(*place, "highest")] = dict(now)
        found[(*place, "last")] = dict(now)
    return found


def _counts(record: Record) -> bool:
    return record.phase.step > 0 and record.size_bytes > 0 and record.phase.name != "evaluation"


def _continue(low_parts: Parts, high_parts: Parts, low: int, high: int, full: int) -> Parts:
    names = low_parts.keys() | high_parts.keys()
    return {name: _line(low_parts.get(name, 0), high_parts.get(name, 0), low, high, full) for name in sorted(names)}


def _line(at_low: int, at_high: int, low: int, high: int, full: int) -> int:
    return at_low + (at_high - at_low) * (full - low) // (high - low)
