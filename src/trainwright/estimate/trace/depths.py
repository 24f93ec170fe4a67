"""A deep model traced by two short ones with the same layers.

What a further layer does to memory is found by laying the records of the two side by side (`lengthened`), and repeated
up to the full depth; peaks, and what the allocator reserves, are then those of the whole model. All layers are traced
where there are few of them, where the two do not differ by whole layers, and where parameters do not grow by the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwright.estimate.request import Request
from trainwright.estimate.trace.lengthened import Recorded, lengthened
from trainwright.estimate.trace.model import build_config, parameters_on_meta
from trainwright.estimate.trace.peaks_report import report, training_records
from trainwright.estimate.trace.run import Run, prepare, trace

SHALLOWEST = 3
"""The first and the last layer differ from those between in what is alive around them."""


def two_depths(request: Request, versions: dict[str, str]) -> dict[str, Any]:
    """Trace two short models and continue to the full depth, or trace the whole one.

    Raises:
        UserError: the model cannot be traced.
    """
    prepare()
    config = build_config(request)
    inner = config.get_text_config()
    full = getattr(inner, "num_hidden_layers", 0)
    traced = depths(full, getattr(inner, "layer_types", None))
    run = None if traced is None else _continued(request, config, traced, full)
    if run is None:
        return report(request, trace(request), versions)
    return {**report(request, run, versions), "depths": {"traced": traced, "full": full}}


def _continued(request: Request, config: Any, traced: tuple[int, int], full: int) -> Run | None:
    low, high = traced
    short, longer = trace(request, layers=low), trace(request, layers=high)
    times = (full - low) // (high - low)
    counts = {name: _line(size, longer.parameters[name], times) for name, size in short.parameters.items()}
    adapters = 0 if request.method.type == "full" else counts["trainable"]
    if counts["total"] - adapters != parameters_on_meta(request, config):
        return None
    parts = short.tracker.parts, longer.tracker.parts
    found = lengthened(training_records(short.tracker), training_records(longer.tracker), parts, times)
    if found is None:
        return None
    return Run(
        Recorded(*found, operators=short.tracker.operators + longer.tracker.operators),
        counts,
        _line(short.static_bytes, longer.static_bytes, times),
        {name: _line(short.attention.get(name, 0), count, times) for name, count in longer.attention.items()},
    )


def _line(at_low: int, at_high: int, times: int) -> int:
    return at_low + (at_high - at_low) * times


def depths(full: int, layer_types: Sequence[str] | None) -> tuple[int, int] | None:
    """Return two depths that end in the same place of the pattern of layers as the full model; None: too few layers."""
    period = _period(layer_types or [])
    low = full % period
    while low < SHALLOWEST:
        low += period
    return None if low + period >= full else (low, low + period)


def _period(pattern: Sequence[str]) -> int:
    for period in range(1, len(pattern)):
        if all(pattern[i] == pattern[i - period] for i in range(period, len(pattern))):
            return period
    return max(1, len(pattern))
