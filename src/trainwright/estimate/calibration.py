"""Predictions corrected by what runs of the same kind measured on the same model of GPU.

Time is off by a factor: clocks, cooling and the speed of links scale every step. Memory is off in three ways, each
corrected as it comes about: what torch allocates by a factor, if a kernel keeps more than was known; fragmentation
(reserved over allocated) by a factor; and what lies outside torch's allocator (context, libraries, communicators) by
a number of bytes, whatever the model.

One run may have had a bad day, so the median counts. Memory is raised at once and by all of it. It is lowered only
when at least three runs agree, and only as far as the least favourable of them; what torch allocates is never lowered,
as a run may not have met its longest batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from trainwright.estimate.figures import Memory, StepTime
from trainwright.estimate.measured_runs import Kind, MeasuredRun

AGREEING_RUNS: Final = 3
SANE: Final = 2.0
"""A run that measured over this many times what was predicted, or under its inverse, is no error of an estimate: other
work on the GPU, say. It is not applied but reported."""


@dataclass(frozen=True, slots=True)
class Basis:
    """What a figure rests on: runs it is corrected by, and runs that differ too much to be used."""

    kind: Kind
    runs: int = 0
    differing: int = 0
    of_kind: bool = True
    """False: only GPU and versions are the same, as no run of the whole kind is on record."""

    @property
    def mark(self) -> str:
        """`estimate` or `calibrated (N runs)`, for tables."""
        return f"calibrated ({_runs(self.runs)})" if self.runs else "estimate"

    @property
    def note(self) -> str | None:
        """A sentence for people, None where nothing is on record."""
        kind = str(self.kind) if self.of_kind else f"{self.kind.gpu}, of other kinds"
        sentences = []
        if self.runs:
            sentences.append(f"calibrated from {_runs(self.runs)} on {kind}")
        if self.differing:
            sentences.append(
                f"measured differs: check: {_runs(self.differing)} on {kind} took over twice or under half"
            )
        return "; ".join(sentences) or None


@dataclass(frozen=True, slots=True)
class _MemoryErrors:
    """What memory predictions of a kind were off by: logarithms of two factors, and bytes."""

    basis: Basis
    growth: float = 0.0
    fragmentation: float = 0.0
    outside_bytes: int = 0


class Calibration:
    """The runs on record, and what they say about later ones."""

    def __init__(self, runs: Iterable[MeasuredRun]) -> None:
        self._runs = tuple(runs)
        self._memory: dict[Kind, _MemoryErrors] = {}
        self._time: dict[Kind, tuple[float, Basis]] = {}

    def memory(self, memory: Memory, kind: Kind) -> tuple[Memory, Basis]:
        """Return the memory of a rank as runs of this kind make it likely, and what that rests on."""
        if kind not in self._memory:
            self._memory[kind] = _memory_errors([run for run in self._runs if _same_kind(run.kind, kind)], kind)
        errors = self._memory[kind]
        if not errors.basis.runs:
            return memory, errors.basis
        growth, reserved_growth = math.exp(errors.growth), math.exp(errors.growth + errors.fragmentation)
        allocated = round(memory.allocated_bytes * growth)
        reserved = max(allocated, round(memory.reserved_bytes * reserved_growth))
        evaluation, evaluation_reserved = memory.evaluation_bytes, memory.evaluation_reserved_bytes
        outside_before = memory.device_bytes - memory.reserved_bytes
        outside = max(0, outside_before + errors.outside_bytes)
        corrected = dataclasses.replace(
            memory,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            device_bytes=reserved + outside,
            parts_bytes=_with_calibration(memory.parts_bytes, allocated - memory.allocated_bytes),
            outside_bytes=_with_calibration(memory.outside_bytes, outside - outside_before),
            evaluation_bytes=None if evaluation is None else round(evaluation * growth),
            evaluation_reserved_bytes=(
                None if evaluation_reserved is None else round(evaluation_reserved * reserved_growth)
            ),
        )
        return corrected, errors.basis

    def time(self, time: StepTime, kind: Kind) -> tuple[StepTime, Basis]:
        """Return the time of a step as runs on this GPU make it likely, and what that rests on.

        Without a run of the whole kind, runs of other kinds on the same GPU count: were only what has been run
        corrected, a slow machine would make all that has not look better.
        """
        if kind not in self._time:
            alike = [run for run in self._runs if _same_kind(run.kind, kind)]
            others = [run for run in self._runs if _same_machine(run.kind, kind)]
            self._time[kind] = _time_factor(alike or others, kind, of_kind=bool(alike))
        factor, basis = self._time[kind]
        if not basis.runs:
            return time, basis
        corrected = dataclasses.replace(
            time,
            step_s=time.step_s * factor,
            low_s=time.low_s * factor,
            high_s=time.high_s * factor,
            parts_s={part: part_s * factor for part, part_s in time.parts_s.items()},
            ranks_s=tuple(rank_s * factor for rank_s in time.ranks_s),
        )
        return corrected, basis


def _memory_errors(runs: list[MeasuredRun], kind: Kind) -> _MemoryErrors:
    pairs = [(run.measured.memory, run.predicted.memory) for run in runs]
    known = [(measured, predicted) for measured, predicted in pairs if measured is not None and predicted is not None]
    sane = [
        (measured, predicted)
        for measured, predicted in known
        if _is_sane(measured.device_bytes, predicted.device_bytes)
    ]
    basis = Basis(kind, runs=len(sane), differing=len(known) - len(sane))
    if not sane:
        return _MemoryErrors(basis)
    growth = median(math.log(measured.allocated_bytes / predicted.allocated_bytes) for measured, predicted in sane)
    fragmentation = _settled(
        [math.log(measured.fragmentation / predicted.fragmentation) for measured, predicted in sane]
    )
    outside = _settled([float(measured.outside_bytes - predicted.outside_bytes) for measured, predicted in sane])
    return _MemoryErrors(basis, max(0.0, growth), fragmentation, round(outside))


def _time_factor(runs: list[MeasuredRun], kind: Kind, *, of_kind: bool) -> tuple[float, Basis]:
    pairs = [(run.measured.token_s, run.predicted.token_s) for run in runs]
    known = [(measured, predicted) for measured, predicted in pairs if measured is not None and predicted is not None]
    logs = [math.log(measured / predicted) for measured, predicted in known if _is_sane(measured, predicted)]
    basis = Basis(kind, runs=len(logs), differing=len(known) - len(logs), of_kind=of_kind)
    # The estimate counts as one more run.
    return (math.exp(median(logs) * len(logs) / (len(logs) + 1)) if logs else 1.0), basis


def _settled(errors: list[float]) -> float:
    """The correction that several runs agree on: upwards the median, downwards what holds for all of them."""
    if (middle := median(errors)) >= 0:
        return middle
    return min(0.0, max(errors)) if len(errors) >= AGREEING_RUNS else 0.0


def _is_sane(measured: float, predicted: float) -> bool:
    return 1 / SANE <= measured / predicted <= SANE


def _with_calibration(parts: Mapping[str, int], added: int) -> Mapping[str, int]:
    return {**parts, "calibration": added} if added else parts


def _same_machine(there: Kind, here: Kind) -> bool:
    """Same GPU and versions; where nothing is installed, as on a login node, any version."""
    return there.gpu == here.gpu and (not here.versions or there.versions == here.versions)


def _same_kind(there: Kind, here: Kind) -> bool:
    return _same_machine(there, here) and dataclasses.replace(there, versions=here.versions) == here


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"
