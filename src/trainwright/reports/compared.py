"""What was predicted beside what was measured, figure by figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from trainwright.reports.steps import Steps
from trainwright.reports.system_curves import SystemCurves
from trainwright.runs.values import mapping, number, text, whole

Unit = Literal["bytes", "s"]
_MEMORY: Final = {
    "allocated_bytes": "memory allocated, peak",
    "reserved_bytes": "memory reserved, peak",
    "device_bytes": "memory in nvidia-smi, peak",
}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One figure; `kind` is what the prediction is: estimate, or calibrated from so many runs. None is not available.

    `low` and `high` are the range that was expected. `source` is where the measured figure comes from.
    """

    what: str
    unit: Unit
    rank: int | None = None
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    kind: str = "estimate"
    measured: float | None = None
    source: str | None = None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return None if self.measured is None or not self.predicted else self.measured / self.predicted

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "ratio": self.ratio}


def compare(
    plan: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
    steps: Steps,
    samples: SystemCurves,
    *,
    ran_s: float | None,
    finished: bool,
) -> Iterator[Compared]:
    """Yield memory by rank, host memory by rank, the time of a step and of the run; `ran_s` is that of all attempts."""
    estimate = mapping(plan, "estimate")
    measured = measured_of_ranks(events)
    yield from _memory_of_ranks(estimate, measured, samples)
    time, kind = mapping(estimate, "time"), text(estimate, "time_kind") or "estimate"
    yield Compared(
        what="time of a step, median",
        unit="s",
        predicted=number(time, "step_s"),
        low=number(time, "low_s"),
        high=number(time, "high_s"),
        kind=kind,
        measured=steps.median_step_s,
        source="metrics.jsonl",
    )
    run = mapping(estimate, "run")
    yield Compared(
        what="time of the run" if finished else "time of the run (not finished)",
        unit="s",
        predicted=number(run, "run_s"),
        low=number(run, "low_s"),
        high=number(run, "high_s"),
        kind=kind,
        measured=ran_s if finished else None,
        source="events.jsonl",
    )


def measured_of_ranks(events: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return what each rank of the last attempt that came to its end measured of itself."""
    records = [event for event in events if event.get("event") == "measured"]
    last = records[-1].get("attempt") if records else None
    of_ranks = {whole(event, "rank"): event for event in records if event.get("attempt") == last}
    return {rank: event for rank, event in of_ranks.items() if rank is not None}


def _memory_of_ranks(
    estimate: Mapping[str, Any], measured: Mapping[int, Mapping[str, Any]], samples: SystemCurves
) -> Iterator[Compared]:
    memory, kind = mapping(estimate, "memory"), text(estimate, "memory_kind") or "estimate"
    parts = mapping(mapping(estimate, "host"), "rank_parts_bytes")
    host = sum(filter(None, (number(parts, name) for name in parts))) or None
    figures = (
        *((what, name, number(memory, name), kind) for name, what in _MEMORY.items()),
        (
            "memory allocated in evaluation, peak",
            "evaluation_allocated_bytes",
            number(memory, "evaluation_bytes"),
            kind,
        ),
        ("host memory, peak", "resident_bytes", host, "estimate"),
    )
    for rank in sorted({*measured, *samples.ranks}):
        own, sampled = measured.get(rank, {}), _sampled(samples, rank)
        for what, name, predicted, of_kind in figures:
            peak, source = _peak(own, sampled, name)
            if predicted is None and peak is None:
                continue
            yield Compared(
                what=what, unit="bytes", rank=rank, predicted=predicted, kind=of_kind, measured=peak, source=source
            )


def _peak(own: Mapping[str, Any], sampled: Mapping[str, float | None], name: str) -> tuple[float | None, str | None]:
    """Return what a rank measured of itself, else what the samples saw, and where that is from."""
    if (peak := number(own, name)) is not None:
        return peak, "events.jsonl"
    peak = sampled.get(name)
    return peak, None if peak is None else "system.jsonl"


def _sampled(samples: SystemCurves, rank: int) -> dict[str, float | None]:
    """Return the highest that the samples saw of a rank; a peak between two samples is not among them."""
    seen, gpu = samples.ranks.get(rank), samples.gpu_of(rank)
    return {
        "allocated_bytes": seen.allocated_peak_bytes if seen else None,
        "reserved_bytes": seen.reserved_peak_bytes if seen else None,
        "device_bytes": gpu.peak_bytes if gpu else None,
        "resident_bytes": seen.resident_peak_bytes if seen else None,
    }
