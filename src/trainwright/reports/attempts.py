"""The attempts of a run: when each began and ended, from which step, and how."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.runs.folder import RunFolder
from trainwright.runs.values import document, number, text, whole
from trainwright.watch.run_state import ENDS


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt. Times are seconds since the epoch; `end` is finished, stopped or failed, None where nothing says.

    `exit_code` is that of the rank that failed, negative for the signal that ended it.
    """

    number: int
    started_s: float | None = None
    ended_s: float | None = None
    from_step: int | None = None
    resumed_from: str | None = None
    end: str | None = None
    step: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    text: str | None = None

    @property
    def duration_s(self) -> float | None:
        """From the start of its ranks to its end, or to its last sign of life."""
        if self.started_s is None or self.ended_s is None or self.ended_s <= self.started_s:
            return None
        return self.ended_s - self.started_s


def read_attempts(
    folder: RunFolder, events: Iterable[Mapping[str, Any]], spans: Mapping[int, Sequence[float]]
) -> list[Attempt]:
    """Return all attempts of which there is a sign; `spans` is when samples saw each of them first and last."""
    events = list(events)
    started = {whole(event, "attempt"): event for event in events if event.get("event") == "started"}
    ended = {whole(event, "attempt"): event for event in events if text(event, "event") in ENDS}
    folders = {number: path for path in folder.logs_dir.glob("attempt_*") if (number := _number_of(path)) is not None}
    numbers = {number for number in (*started, *ended, *folders, *spans) if number}
    return [
        _attempt(n, folder.attempt_dir(n) / "start.json", started.get(n, {}), ended.get(n, {}), spans.get(n, ()))
        for n in sorted(numbers)
    ]


def _attempt(
    n: int, start_json: Path, began: Mapping[str, Any], end: Mapping[str, Any], span: Sequence[float]
) -> Attempt:
    start = document(start_json, [])
    seen_first, seen_last = (span[0], span[-1]) if span else (None, None)
    started_s, ended_s = number(start, "time_s"), number(end, "time_s")
    from_step = whole(began, "step")
    resumed_from = text(start, "resume_from")
    return Attempt(
        number=n,
        started_s=seen_first if started_s is None else started_s,
        ended_s=seen_last if ended_s is None else ended_s,
        from_step=whole(start, "step") if from_step is None else from_step,
        resumed_from=None if resumed_from is None else Path(resumed_from).name,
        end=text(end, "event"),
        step=whole(end, "step"),
        rank=whole(end, "rank"),
        exit_code=whole(end, "exit_code"),
        text=text(end, "text"),
    )


def _number_of(path: Path) -> int | None:
    match = re.fullmatch(r"attempt_([0-9]{1,9})", path.name, re.ASCII)
    return int(match[1]) if match else None


def worked_s(attempts: Iterable[Attempt]) -> float | None:
    """Return how long the attempts took together, None where that of none is known."""
    known = [seconds for attempt in attempts if (seconds := attempt.duration_s) is not None]
    return sum(known) if known else None
