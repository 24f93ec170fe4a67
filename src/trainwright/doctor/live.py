"""A run that is still going: does it get on, and if not, which rank keeps the others waiting."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from trainwright.doctor.inputs import stored
from trainwright.runs.folder import RunFolder

QUIET_S: Final = 60.0
STEPS_QUIET: Final = 10.0
"""Of usual step times; a save or an evaluation takes a few, a run that does not get on at all takes more."""
_WAITING: Final = ("communication",)


@dataclass(frozen=True)
class Standing:
    """Where a run that goes on is: whether it stands still, the rank that holds it up, and what shows it."""

    hangs: bool
    text: str
    rank: int | None = None
    pid: int | None = None


def standing(folder: RunFolder) -> Standing | None:
    """Return how a run under way is doing; None where no launcher holds it."""
    if not _is_held(folder.lock_file):
        return None
    ranks = sorted(_ranks(folder.path), key=lambda rank: int(rank["rank"]))
    for rank in ranks:
        if _state(rank) == psutil.STATUS_STOPPED:
            text = f"rank {rank['rank']} (pid {rank['pid']}) is stopped (state T): kill -CONT {rank['pid']}"
            return Standing(True, text, rank["rank"], rank["pid"])
    if not ranks:
        return Standing(False, "the run is starting")
    late = min(ranks, key=lambda rank: (rank["section"] in _WAITING, rank["section_since_s"]))
    quiet_s = time.time() - min(rank["section_since_s"] for rank in ranks)
    steps = max(1, max(rank.get("steps_total") or 1 for rank in ranks))
    usual_s = sum((late.get("sections_s_total") or {}).values()) / steps
    if quiet_s > max(QUIET_S, STEPS_QUIET * usual_s):
        text = f"rank {late['rank']} is in `{late['section']}` for {quiet_s:.0f} s, a step takes {usual_s:.1f} s"
        return Standing(True, text, late["rank"], late["pid"])
    return Standing(False, f"the run is going on: step {late.get('step')}, rank 0 in `{ranks[0]['section']}`")


def _is_held(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _ranks(run: Path) -> Iterator[dict[str, Any]]:
    for path in run.glob("ranks/rank_*.json"):
        record = stored(path)
        if {"rank", "pid", "section", "section_since_s"} <= record.keys():
            yield record


def _state(rank: dict[str, Any]) -> str | None:
    """The state of a rank's process, where it is one of this machine."""
    try:
        process = psutil.Process(rank["pid"])
        return process.status() if "trainwright" in " ".join(process.cmdline()) else None
    except psutil.Error:
        return None
