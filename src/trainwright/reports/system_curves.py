"""system.jsonl of every node, in the order of time: the curves of GPUs, host and ranks, and their peaks."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

from trainwright.hardware.reading import GIB
from trainwright.reports.curves import Curve
from trainwright.runs import records
from trainwright.runs.folder import RunFolder
from trainwright.runs.values import document, mapping, mappings, number, text, whole
from trainwright.watch.json_lines import evenly
from trainwright.watch.ranks import read_ranks

MOST_LINES: Final = 4
"""Of more GPUs or nodes than these a plot shows the range and the mean of all."""
ALL: Final = "all"


@dataclass
class GpuSeen:
    """One GPU over the run."""

    name: str | None = None
    uuid: str | None = None
    total_bytes: float | None = None
    peak_bytes: float | None = None
    utilization_sum: float = 0.0
    utilization_count: int = 0
    hottest_c: float | None = None

    @property
    def peak_pct(self) -> float | None:
        """Peak of used memory as a share of all."""
        return 100 * self.peak_bytes / self.total_bytes if self.peak_bytes is not None and self.total_bytes else None

    @property
    def mean_utilization_pct(self) -> float | None:
        """Mean over all samples in which a rank was at work on its steps."""
        return self.utilization_sum / self.utilization_count if self.utilization_count else None


@dataclass
class RankSeen:
    """One rank over the run: peaks in bytes, and the seconds in each section, by attempt."""

    allocated_peak_bytes: float | None = None
    reserved_peak_bytes: float | None = None
    resident_peak_bytes: float | None = None
    gpu_uuid: str | None = None
    sections_s: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def sections_s_total(self) -> dict[str, float]:
        """Seconds in each section over all attempts."""
        names = dict.fromkeys(name for spent in self.sections_s.values() for name in spent)
        return {name: sum(spent.get(name, 0.0) for spent in self.sections_s.values()) for name in names}


Places = dict[tuple[str, int], GpuSeen]


@dataclass
class SystemCurves:
    """What the samplers of all nodes saw. Curves are by figure and by what they are of.

    `own_gpus` are the UUIDs of the GPUs that the run was on: others are left out, as other programs use them. None:
    which they were is not known, and all count.
    """

    own_gpus: frozenset[str] | None = None
    curves: dict[str, dict[str, Curve]] = field(default_factory=dict)
    gpus: Places = field(default_factory=dict)
    """By node and index."""
    ranks: dict[int, RankSeen] = field(default_factory=dict)
    spans: dict[int, list[float]] = field(default_factory=dict)
    """When each attempt was seen first and last, in seconds since the epoch."""
    nodes: set[str] = field(default_factory=set)
    total_steps: int | None = None
    """Steps of the whole run, as the ranks say."""
    count: int = 0

    @property
    def heard_s(self) -> float | None:
        """The last sign of life."""
        return max((last for _, last in self.spans.values()), default=None)

    def lines(self, figure: str) -> dict[str, Curve]:
        """Return a figure's curve of each GPU or node, or the one of all where there are many."""
        curves = self.curves.get(figure, {})
        each = {of: curve for of, curve in curves.items() if of != ALL}
        return each if len(each) <= MOST_LINES else {ALL: curves[ALL]}

    def add(self, sample: Mapping[str, Any], time_s: float) -> None:
        """Take the next sample of any node."""
        node, host, attempt = text(sample, "node") or "", mapping(sample, "host"), whole(sample, "attempt")
        self.count += 1
        self.nodes.add(node)
        if attempt is not None:
            self.spans.setdefault(attempt, [time_s, time_s])[1] = time_s
        available = number(host, "memory_available_bytes")
        self._draw("host_available_gib", node, time_s, None if available is None else available / GIB)
        self._draw("host_cpu_pct", node, time_s, number(host, "cpu_pct"))
        at_work = False
        for rank in mappings(sample, "ranks"):
            at_work |= bool(whole(rank, "steps_total"))
            self.add_rank(rank)
        for gpu in mappings(sample, "gpus"):
            self._add_gpu(node, gpu, time_s, at_work)

    def add_rank(self, rank: Mapping[str, Any]) -> None:
        """Take what a rank says of itself, the newest last."""
        index = whole(rank, "rank")
        if index is None:
            return
        self.total_steps = whole(rank, "total_steps") or self.total_steps
        seen = self.ranks.setdefault(index, RankSeen())
        seen.gpu_uuid = text(rank, "gpu_uuid") or seen.gpu_uuid
        seen.allocated_peak_bytes = _higher(seen.allocated_peak_bytes, number(rank, "allocated_peak_bytes"))
        seen.reserved_peak_bytes = _higher(seen.reserved_peak_bytes, number(rank, "reserved_bytes"))
        seen.resident_peak_bytes = _higher(seen.resident_peak_bytes, number(rank, "resident_bytes"))
        spent = mapping(rank, "sections_s_total")
        known = {name: seconds for name in spent if (seconds := number(spent, name)) is not None}
        if known:
            seen.sections_s[whole(rank, "attempt") or 0] = known

    def _add_gpu(self, node: str, gpu: Mapping[str, Any], time_s: float, at_work: bool) -> None:
        index = whole(gpu, "index")
        if index is None or not self._is_own(text(gpu, "uuid")):
            return
        seen = self.gpus.setdefault((node, index), GpuSeen())
        seen.name, seen.uuid = text(gpu, "name") or seen.name, text(gpu, "uuid") or seen.uuid
        seen.total_bytes = number(gpu, "memory_total_bytes") or seen.total_bytes
        used, utilization = number(gpu, "memory_used_bytes"), number(gpu, "utilization_pct")
        seen.peak_bytes = _higher(seen.peak_bytes, used)
        if utilization is not None and at_work:
            seen.utilization_sum += utilization
            seen.utilization_count += 1
        temperature = number(gpu, "temperature_c")
        seen.hottest_c = _higher(seen.hottest_c, temperature)
        place = f"{node}:{index}"
        self._draw("gpu_memory_gib", place, time_s, None if used is None else used / GIB)
        self._draw("gpu_utilization_pct", place, time_s, utilization)
        self._draw("gpu_temperature_c", place, time_s, temperature)

    def _is_own(self, uuid: str | None) -> bool:
        """Whether a rank was on a GPU; of any GPU where the ranks do not say which they are on."""
        own = self.own_gpus
        if own is None:
            said = {seen.gpu_uuid for seen in self.ranks.values()}
            return not said or None in said or uuid in said
        return uuid in own

    def _draw(self, figure: str, of: str, time_s: float, value: float | None) -> None:
        if value is None:
            return
        curves = self.curves.setdefault(figure, {ALL: Curve()})
        curves[ALL].add(time_s, value)
        if of not in curves and len(curves) <= MOST_LINES + 1:
            curves[of] = Curve()
        if of in curves:
            curves[of].add(time_s, value)

    def mean_utilization_pct(self) -> float | None:
        """Return the mean over the GPUs while steps were done."""
        known = [value for gpu in self.gpus.values() if (value := gpu.mean_utilization_pct) is not None]
        return fmean(known) if known else None

    def gpu_of(self, rank: int) -> GpuSeen | None:
        """Return the GPU that a rank said it is on."""
        uuid = self.ranks[rank].gpu_uuid if rank in self.ranks else None
        return next((gpu for gpu in self.gpus.values() if uuid is not None and gpu.uuid == uuid), None)


def read_samples(folder: RunFolder, passed_over: records.PassedOver | None = None) -> SystemCurves:
    """Read the samples of all nodes, and what each rank said last."""
    files = [_timed(records.read(path, passed_over)) for path in sorted(folder.path.glob("system*.jsonl"))]
    return _of(folder, heapq.merge(*files, key=lambda timed: timed[0]))


def first_and_last(folder: RunFolder) -> SystemCurves:
    """Read the first and the last sample of the first node, and what each rank said last."""
    return _of(folder, _timed(evenly(folder.system_jsonl, 2)))


def _of(folder: RunFolder, timed: Iterable[tuple[float, Mapping[str, Any]]]) -> SystemCurves:
    said = read_ranks(folder, None)
    samples = SystemCurves(own_gpus=_own_gpus(folder, [rank.gpu_uuid for rank in said]))
    for time_s, sample in timed:
        samples.add(sample, time_s)
    for rank in said:
        samples.add_rank(vars(rank))
        attempt, said_s = whole(vars(rank), "attempt"), number(vars(rank), "time_s")
        if attempt is not None and said_s is not None:
            span = samples.spans.setdefault(attempt, [said_s, said_s])
            span[1] = max(span[1], said_s)
    return samples


def _own_gpus(folder: RunFolder, said: Sequence[str | None]) -> frozenset[str] | None:
    """Return the GPUs of a run by what its ranks said; none for a run that its plan put on another device."""
    device = text(mapping(document(folder.plan_json, []), "layout"), "device")
    if device is not None and device != "cuda":
        return frozenset()
    named = frozenset(uuid for uuid in said if uuid is not None)
    return named if named and None not in said else None


def _timed(samples: Iterable[dict[str, Any]]) -> Iterator[tuple[float, dict[str, Any]]]:
    for record in samples:
        if (time_s := number(record, "time_s")) is not None:
            yield time_s, record


def _higher(before: float | None, value: float | None) -> float | None:
    return value if before is None or (value is not None and value > before) else before
