"""From a run to figures: the peak of each phase, of what it consists, and what the caching allocator makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.estimate.allocator import CachingAllocator, MemoryEvent, replay
from trainwright.estimate.figures import PARTS
from trainwright.estimate.request import Request
from trainwright.estimate.script_request import ScriptRequest
from trainwright.estimate.trace.run import Run
from trainwright.estimate.trace.tracker import Record, Records, TracePhase

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class TracedPeak:
    """The highest point of a run or a phase, in bytes as tensors ask for them."""

    requested_bytes: int
    phase: TracePhase
    operator: str
    parts: dict[str, int]


def report(request: Request | ScriptRequest, run: Run, versions: dict[str, str]) -> dict[str, Any]:
    """Return the figures of a traced run; the same request gives the same bytes."""
    records = training_records(run.tracker)
    parts = part_of_each(run.tracker, records)
    training = [record for record in records if record.phase.name != "evaluation"]
    peaks = phase_peaks(records, parts)
    peak = max((p for p in peaks if p.phase.name != "evaluation"), key=lambda p: p.requested_bytes)
    allocator = _allocator(request, training)
    found: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "versions": versions,
        "parameters": run.parameters,
        "static_bytes": run.static_bytes,
        "peak": {
            "allocated_bytes": allocator.peak_allocated_bytes,
            "reserved_bytes": allocator.peak_reserved_bytes,
            **_place(peak),
            "parts_bytes": {
                **peak.parts,
                "rounding": allocator.peak_allocated_bytes - peak.requested_bytes,
                "cached": allocator.peak_reserved_bytes - allocator.peak_allocated_bytes,
            },
            "retries": allocator.retries,
            "out_of_memory": allocator.out_of_memory,
        },
        "phases": [{**_place(p), "requested_bytes": p.requested_bytes} for p in peaks],
        "attention_kernels": run.attention,
        "operators": run.tracker.operators,
    }
    if request.evaluation_batch_size is not None:
        evaluation = next(p for p in peaks if p.phase.name == "evaluation")
        found["evaluation"] = {
            "requested_bytes": evaluation.requested_bytes,
            "reserved_bytes": _allocator(request, records).peak_reserved_bytes,
            "parts_bytes": evaluation.parts,
            **_place(evaluation),
        }
    return found


def training_records(tracker: Records) -> list[Record]:
    """Return what the steps see: memory that the finished model holds, then all that happens in the steps.

    Left out is what building it on the GPU took and gave back, as a model is built on the CPU and then moved. A
    strategy that wraps it moves it unit by unit, and what it takes meanwhile stays in the allocator's hands.
    """
    records = tracker.records
    gone = _freed(record for record in records if record.phase.name == "setup")
    kept = [record for record in records if record.key not in gone]
    wrapping = [i for i, record in enumerate(kept) if record.phase.name == "wrapping"]
    if not wrapping:
        return kept
    first, last = wrapping[0], wrapping[-1] + 1
    moved = _freed(kept[first:last])
    built = {record.key: record for record in kept[:first] if record.key in moved}
    begin = [record for record in kept[:first] if record.key not in built]
    return begin + _moved_by_unit(built, kept[first:last]) + kept[last:]


def _freed(records: Iterable[Record]) -> set[int]:
    return {record.key for record in records if record.size_bytes < 0}


def _moved_by_unit(built: dict[int, Record], wrapping: Sequence[Record]) -> list[Record]:
    """Let parameters come to the GPU when the unit is wrapped with which they go again."""
    found: list[Record] = []
    unit_begins, unit_ends = 0, False
    for record in wrapping:
        if record.size_bytes < 0 and record.key in built:
            found.insert(unit_begins, built[record.key])
            unit_begins, unit_ends = unit_begins + 1, True
        elif unit_ends:
            unit_begins, unit_ends = len(found), False
        found.append(record)
    return found


def part_of_each(tracker: Records, records: Sequence[Record]) -> dict[int, str]:
    """Say of each piece of memory what it is part of: as labelled, or by when it was made and went.

    What outlives the pass that made it is an activation (forward) or a gradient (backward: those that FSDP keeps whole
    until the last micro-batch). All else is temporary.
    """
    parts = dict(tracker.parts)
    born: dict[int, TracePhase] = {}
    for record in records:
        if record.size_bytes > 0:
            born[record.key] = record.phase
            if record.phase.step == 0:
                parts.setdefault(record.key, "weights")
        elif record.key not in parts:
            made_in = born[record.key]
            outlives = record.phase != made_in
            kept_as = {"forward": "activations", "backward": "gradients"}.get(made_in.name, "temporaries")
            parts[record.key] = kept_as if outlives else "temporaries"
    for key in born:
        parts.setdefault(key, "temporaries")
    return parts


def phase_peaks(records: Sequence[Record], parts: dict[int, str]) -> list[TracedPeak]:
    """Return the peak of each phase of the steps, in the order they come in."""
    now: Counter[str] = Counter()
    total = 0
    peaks: dict[TracePhase, TracedPeak] = {}
    for record in records:
        total += record.size_bytes
        now[parts[record.key]] += record.size_bytes
        phase = record.phase
        if phase.step > 0 and (phase not in peaks or total > peaks[phase].requested_bytes):
            peaks[phase] = TracedPeak(total, phase, record.operator, in_order(now))
    return list(peaks.values())


def in_order(parts: Counter[str]) -> dict[str, int]:
    """Return the parts that hold anything, in the order of PARTS."""
    assert parts.keys() <= set(PARTS), set(parts) - set(PARTS)
    return {part: parts[part] for part in PARTS if parts[part]}


def _allocator(request: Request | ScriptRequest, records: Sequence[Record]) -> CachingAllocator:
    return replay(
        (MemoryEvent(record.key, record.size_bytes, record.stream, record.held) for record in records),
        expandable_segments=request.expandable_segments,
        capacity_bytes=request.capacity_bytes,
    )


def _place(peak: TracedPeak) -> dict[str, Any]:
    return {"phase": peak.phase.name, "step": peak.phase.step, "operator": peak.operator}
