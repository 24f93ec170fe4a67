"""Where each rank stands by its heartbeat, and how long it may stay there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainwright.errors import UserError
from trainwright.runs.folder import RunFolder
from trainwright.runs.values import number, text, whole
from trainwright.runs.writing import read_json

STEP_SECTIONS: Final = ("data", "forward", "backward", "communication", "optimizer")
"""What one optimizer step is made of, by the names of the workers' sections."""
START_S: Final = 3600.0
"""Time to load a model from slow storage; NVIDIA NVRx gives a rank's first heartbeat as long."""
LONG: Final = 6.0
"""A save, a part of an evaluation, and an attempt's first step, which may compile, get so many times the time-out."""
USUAL: Final = 3.0
"""And never less than so many times the 99th percentile of the stays in a section that the rank has seen."""
NO_SIGN_S: Final = 5.0
"""A heartbeat is written once a second; on a busy machine some seconds may pass."""


@dataclass(frozen=True, kw_only=True)
class RankSection:
    """Where a rank stands, for how long, and how long it may; `silent_s` is the age of its last sign of life."""

    rank: int
    section: str
    there_s: float
    limit_s: float
    silent_s: float = 0.0
    done: int = 0
    """The last step that it did."""
    pid: int | None = None
    node: str | None = None
    ended: bool = False

    @property
    def step(self) -> int:
        """The step that it is at; what comes after a step counts to it."""
        return self.done + (self.section in STEP_SECTIONS)

    @property
    def overdue(self) -> bool:
        """Whether it has been there longer than it may."""
        return self.ended or self.there_s > self.limit_s

    @property
    def silent(self) -> bool:
        """Whether the whole process stands still: not even its heartbeat, a thread of its own, goes on."""
        return not self.ended and self.silent_s > max(NO_SIGN_S, self.there_s / 2)

    def __str__(self) -> str:
        if self.ended:
            return f"rank {self.rank} has ended"
        where = f"`{self.section}` of step {self.step:,}" if self.section in STEP_SECTIONS else f"`{self.section}`"
        if self.silent:
            return f"rank {self.rank} was heard of last {self.silent_s:.0f} s ago, in {where}"
        return f"rank {self.rank} is in {where} for {self.there_s:.0f} s (limit {self.limit_s:.0f} s)"


def limit_s(heartbeat: Mapping[str, Any], timeout_s: float) -> float:
    """Return how long a rank may stay in the section that it is in; `timeout_s` is the job's, for one of a step."""
    section = heartbeat["section"]
    if section == "start":
        floor_s = max(START_S, LONG * timeout_s)
    elif section not in STEP_SECTIONS or not heartbeat.get("steps_total"):
        floor_s = LONG * timeout_s
    else:
        floor_s = timeout_s
    return max(floor_s, USUAL * float((heartbeat.get("sections_p99_s") or {}).get(section, 0.0)))


def heartbeats(folder: RunFolder, attempt: int) -> dict[int, Mapping[str, Any]]:
    """Return what each rank of an attempt said last."""
    return {beat["rank"]: beat for beat in _records(folder) if beat.get("attempt") == attempt}


def _records(folder: RunFolder) -> Iterator[Mapping[str, Any]]:
    for path in sorted(folder.ranks_dir.glob("rank_*.json")):
        try:
            record = read_json(path)
        except (OSError, UserError):
            continue  # being written for the first time, or no rank's file at all
        if isinstance(record, dict) and _is_heartbeat(record):
            yield record


def _is_heartbeat(record: Mapping[str, Any]) -> bool:
    times = (number(record, "section_since_s"), number(record, "time_s"))
    p99_s = record.get("sections_p99_s") or {}
    return (
        whole(record, "rank") is not None
        and text(record, "section") is not None
        and None not in times
        and isinstance(p99_s, dict)
        and all(number(p99_s, name) is not None for name in p99_s)
    )
