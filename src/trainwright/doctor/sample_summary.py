"""What the samples of a run (system.jsonl) show: lost and throttled cards, kills for memory, waiting for data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Final

from trainwright.runs import records
from trainwright.runs.values import mapping, mappings, number, whole

USED_PCT: Final = 50.0
"""GPU utilisation that the guides ask for at least (S2-18)."""
THROTTLED_SHARE: Final = 0.2
DATA_SHARE: Final = 0.3
COMMUNICATION_SHARE: Final = 0.4
SLOW: Final = 0.7
"""Compute time of the fastest rank over that of the slowest: below it the slow one is named."""
FEWEST: Final = 5
_HEAT: Final = ("thermal", "power_brake")


@dataclass(frozen=True)
class Seen:
    """A cause that samples show, with the figures."""

    cause: str
    text: str
    place: str
    rank: int | None = None


@dataclass
class SampleSummary:
    """Figures gathered over all samples of a run, small whatever their number."""

    count: int = 0
    place: str = "system.jsonl"
    oom_kills: tuple[int, int] | None = None
    lost: set[int] = field(default_factory=set)
    xid: tuple[int, int] | None = None
    utilisation: list[float] = field(default_factory=list)
    throttled: Counter[int] = field(default_factory=Counter)
    hottest: dict[int, float] = field(default_factory=dict)
    waiting_for_disk: int = 0
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def killed_for_memory(self) -> int:
        """How many processes the kernel killed for memory while the run was sampled."""
        return 0 if self.oom_kills is None else self.oom_kills[1] - self.oom_kills[0]


def read_samples(paths: Sequence[Path]) -> SampleSummary | None:
    """Gather the figures; None where there is not one sample."""
    summary = SampleSummary()
    for path in paths:
        for record in records.read(path):
            summary.count += 1
            summary.place = path.name
            _host(summary, mapping(record, "host"))
            for gpu in mappings(record, "gpus"):
                _gpu(summary, gpu)
            for rank in mappings(record, "ranks"):
                _rank(summary, rank)
    return summary if summary.count else None


def _host(summary: SampleSummary, host: Mapping[str, Any]) -> None:
    kills = whole(host, "oom_kill_total")
    if kills is not None:
        summary.oom_kills = (summary.oom_kills[0] if summary.oom_kills else kills, kills)


def _gpu(summary: SampleSummary, gpu: Mapping[str, Any]) -> None:
    index, last_xid = whole(gpu, "index"), whole(gpu, "last_xid")
    if index is None:
        return
    if gpu.get("lost") is True:
        summary.lost.add(index)
    if gpu.get("xid_total") and last_xid is not None:
        summary.xid = (index, last_xid)
    utilisation, temperature = number(gpu, "utilization_pct"), number(gpu, "temperature_c")
    if utilisation is not None:
        summary.utilisation.append(utilisation)
    reasons = gpu.get("throttle_reasons")
    if isinstance(reasons, list) and any(word in str(reason) for reason in reasons for word in _HEAT):
        summary.throttled[index] += 1
    if temperature is not None:
        summary.hottest[index] = max(summary.hottest.get(index, 0.0), temperature)


def _rank(summary: SampleSummary, rank: Mapping[str, Any]) -> None:
    index = whole(rank, "rank")
    if index is not None:
        summary.ranks[index] = dict(rank)
        summary.waiting_for_disk += rank.get("process_state") == "D"


def failures_in(samples: SampleSummary) -> Iterator[Seen]:
    """Yield what can have ended the run, as the kernel and the driver counted it."""
    if samples.lost:
        yield Seen("gpu-lost", f"GPU {min(samples.lost)} no longer answers", samples.place)
    if samples.xid is not None:
        gpu, xid = samples.xid
        known = {79: "gpu-lost", 48: "gpu-ecc", 63: "gpu-ecc", 64: "gpu-ecc", 94: "gpu-ecc", 95: "gpu-ecc"}
        yield Seen(known.get(xid, "gpu-xid"), f"GPU {gpu} reported Xid {xid}", samples.place)
    if samples.killed_for_memory > 0:
        text = f"the kernel's oom_kill counter rose by {samples.killed_for_memory} during the run"
        yield Seen("host-oom/kernel", text, samples.place)


def slowness_in(samples: SampleSummary) -> Iterator[Seen]:
    """Yield what makes a run slow, the likeliest first (S2-32, S2-33)."""
    for gpu, times in samples.throttled.items():
        if times >= max(FEWEST, THROTTLED_SHARE * samples.count):
            heat = f", up to {samples.hottest[gpu]:.0f} °C" if gpu in samples.hottest else ""
            share = times / samples.count
            yield Seen("gpu-throttled", f"GPU {gpu} was throttled in {share:.0%} of the samples{heat}", samples.place)
    yield from _straggler(samples)
    if len(samples.utilisation) >= FEWEST and mean(samples.utilisation) < USED_PCT:
        yield _why_idle(samples)


def _straggler(samples: SampleSummary) -> Iterator[Seen]:
    times = {rank: pace for rank, record in samples.ranks.items() if (pace := _compute_s(record)) is not None}
    if len(times) < 2:
        return
    slowest = max(times, key=lambda rank: times[rank])
    score = min(times.values()) / times[slowest]
    if score < SLOW:
        text = f"rank {slowest} computes {times[slowest]:.3g} s a step, the fastest {min(times.values()):.3g} s"
        yield Seen("slow-rank", text, samples.place, slowest)


def _compute_s(record: Mapping[str, Any]) -> float | None:
    """Seconds of forward and backward pass a step, means: medians hide a rank that is throttled now and then."""
    steps = whole(record, "steps_total") or 0
    return (_section(record, "forward") + _section(record, "backward")) / steps if steps >= FEWEST else None


def _section(record: Mapping[str, Any], name: str) -> float:
    return number(mapping(record, "sections_s_total"), name) or 0.0


def _why_idle(samples: SampleSummary) -> Seen:
    names = ("data", "forward", "backward", "communication", "optimizer")
    totals = {name: sum(_section(record, name) for record in samples.ranks.values()) for name in names}
    whole = sum(totals.values())
    used = f"GPU utilisation is {mean(samples.utilisation):.0f} % on average"
    if whole and totals["data"] / whole > DATA_SHARE:
        disk = samples.waiting_for_disk >= max(FEWEST, samples.count // 5)
        text = f"{used}; {totals['data'] / whole:.0%} of a step is spent waiting for data"
        return Seen("disk-bound" if disk else "data-starvation", text, samples.place)
    if whole and totals["communication"] / whole > COMMUNICATION_SHARE:
        text = f"{used}; {totals['communication'] / whole:.0%} of a step is communication"
        return Seen("communication-bound", text, samples.place)
    return Seen("batch-too-small", f"{used}, and neither data nor communication takes the time", samples.place)
