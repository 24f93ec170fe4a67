"""A run that is still going: how it does, and if it stands still, which rank keeps the others waiting."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from trainwright.doctor.inputs import stored
from trainwright.job.schema import ResourcesSection
from trainwright.launch.hangs.evidence import look
from trainwright.launch.hangs.fault import Hang, find_fault
from trainwright.launch.hangs.rank_sections import RankSection, heartbeats, limit_s
from trainwright.launch.hangs.watching import stands_still
from trainwright.runs import records
from trainwright.runs.folder import RunFolder
from trainwright.runs.values import mapping, number, text, whole

PATIENCE: Final = 0.1
"""Who asks is told after this share of the time-out that the launcher waits before it ends a run: a minute of ten."""
RECENT_STEPS: Final = 20


@dataclass(frozen=True)
class LiveStatus:
    """How a run does; `hang` is what holds it up, with the pid of the rank at fault, if it stands still."""

    text: str
    hang: Hang | None = None
    pid: int | None = None


def standing(folder: RunFolder) -> LiveStatus | None:
    """Return how a run under way is doing; None where no launcher holds it.

    Where it seems to stand still, the ranks are asked for their stacks and collectives, which harms nothing.
    """
    if not _is_held(folder.lock_file):
        return None
    attempt = folder.attempt
    beats = heartbeats(folder, attempt)
    if not beats:
        script = folder.script_json(attempt).exists()
        return LiveStatus("a script of your own tells no sections: see its log" if script else "the run is starting")
    timeout_s = number(mapping(stored(folder.resolved_json), "resources"), "hang_timeout_s")
    timeout_s = timeout_s or ResourcesSection().hang_timeout_s
    places = [_place(beat, PATIENCE * timeout_s) for _, beat in sorted(beats.items())]
    if stands_still(places) or any(place.silent for place in places):
        hang = _held_up(folder, attempt, places)
        if hang is not None:
            pid = None if hang.rank is None else whole(beats[hang.rank], "pid")
            return LiveStatus(hang.why, hang, pid)
    return LiveStatus(_figures(folder, attempt, beats))


def _held_up(folder: RunFolder, attempt: int, places: list[RankSection]) -> Hang | None:
    """Return what holds the run up; None where a rank without a sign of life is but slow to give one."""
    try:
        evidence = look(folder, attempt, places)
    except OSError:  # somebody else's run, or a disk that takes no files: the heartbeats have to do
        evidence = {}
    hang = find_fault(places, evidence)
    return hang if stands_still(places) or hang.kind in ("hang/stopped", "hang/silent") else None


def _place(beat: Mapping[str, Any], timeout_s: float) -> RankSection:
    """Return where a rank stands by one look and the wall clock, which is all that there is to go by here."""
    now_s = time.time()
    return RankSection(
        rank=beat["rank"],
        section=beat["section"],
        there_s=now_s - beat["section_since_s"],
        limit_s=limit_s(beat, timeout_s),
        silent_s=now_s - beat["time_s"],
        done=whole(beat, "step") or 0,
        pid=whole(beat, "pid"),
        node=text(beat, "node"),
    )


def _figures(folder: RunFolder, attempt: int, beats: Mapping[int, Mapping[str, Any]]) -> str:
    """Say how far the run is, how fast, and how long it will take, as measured."""
    steps = list(_steps_of(folder, attempt))
    where = ", ".join(f"rank {rank} in `{beat['section']}`" for rank, beat in sorted(beats.items())[:8])
    paces_s = [step_s for record in steps[-RECENT_STEPS:] if (step_s := number(record, "step_s")) is not None]
    if not paces_s:
        return f"the run goes on, no step is done yet: {where}"
    last, total = steps[-1], whole(next(iter(beats.values())), "total_steps") or 0
    step, step_s, loss = whole(last, "step") or 0, fmean(paces_s), number(last, "loss")
    of_all = f" of {total:,}" if total else ""
    left = f", {max(0, total - step) * step_s / 60:.1f} min left" if total else ""
    return (
        f"the run goes on: step {step:,}{of_all}, {step_s:.3g} s a step, "
        f"{number(last, 'tokens_per_s') or 0:,.0f} tokens/s, loss {'not finite' if loss is None else f'{loss:.4g}'}"
        f"{left} (measured); {where}"
    )


def _steps_of(folder: RunFolder, attempt: int) -> Iterator[dict[str, Any]]:
    for record in records.read(folder.metrics_jsonl):
        is_step = record.get("kind") == "train" and whole(record, "step") is not None
        if is_step and record.get("attempt") == attempt:
            yield record


def _is_held(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
