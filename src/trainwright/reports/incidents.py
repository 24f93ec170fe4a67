"""What happened to a run besides its steps: attempts, failures, less memory, other shares, losses, alerts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainwright.out_of_memory import LESS_MEMORY
from trainwright.reports.attempts import Attempt
from trainwright.reports.steps import Steps
from trainwright.runs import records
from trainwright.runs.folder import RunFolder
from trainwright.runs.values import mapping, number, text, whole

LAST_LINES: Final = 12
"""How much of what a rank said at its end is shown; its log has the rest."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One of them. `time_s` in seconds since the epoch and `step` are where it was, None where nothing says."""

    what: str
    time_s: float | None = None
    attempt: int | None = None
    step: int | None = None
    lines: tuple[str, ...] = ()
    """What was said of it."""
    bad: bool = False


@dataclass
class _Alarm:
    what: str
    advice: str
    severity: str
    first_s: float
    since_s: float | None
    times: int = 0
    lasted_s: float = 0.0


def incidents(events: Sequence[Mapping[str, Any]], attempts: Iterable[Attempt], steps: Steps) -> Iterator[Incident]:
    """Yield what the events and the metrics tell, attempt by attempt."""
    for attempt in attempts:
        yield _beginning(attempt)
        yield from (_balanced(event) for event in _within(events, attempt.number) if event.get("event") == "balanced")
        if (ending := _ending(attempt)) is not None:
            yield ending
        for event in events:
            if event.get("event") == LESS_MEMORY and whole(event, "attempt") == attempt.number:
                yield _less_memory(event)
    if steps.not_finite:
        told = ", ".join(f"{step:,}" for step in steps.not_finite)
        yield Incident(what=f"the loss was not finite at step {told}", step=steps.not_finite[0], bad=True)
    if steps.done_again:
        yield Incident(what=f"{steps.done_again:,} steps were done again after a resume; the second time counts")


def _beginning(attempt: Attempt) -> Incident:
    step = attempt.from_step
    if attempt.resumed_from is not None:
        what = f"attempt {attempt.number} resumed from {attempt.resumed_from}"
    elif attempt.number == 1:
        what = "the run began"
    else:
        what = f"attempt {attempt.number} began" + (" at the start" if step == 0 else "")
    return Incident(what=what, time_s=attempt.started_s, attempt=attempt.number, step=step)


def _ending(attempt: Attempt) -> Incident | None:
    if attempt.end is None:
        return None
    place = {"time_s": attempt.ended_s, "attempt": attempt.number, "step": attempt.step}
    if attempt.end == "finished":
        return Incident(what="the run finished", **place)  # type: ignore[arg-type]
    if attempt.end == "stopped":
        return Incident(what="the run was asked to stop, and saved", **place)  # type: ignore[arg-type]
    how = "" if attempt.exit_code is None else f" (exit code {attempt.exit_code})"
    lines = tuple((attempt.text or "").strip().splitlines()[-LAST_LINES:])
    return Incident(what=f"rank {attempt.rank} failed{how}", lines=lines, bad=True, **place)  # type: ignore[arg-type]


def _within(events: Sequence[Mapping[str, Any]], attempt: int) -> Iterator[Mapping[str, Any]]:
    """Yield the events from an attempt's start to the next one's: a change of shares does not say its attempt."""
    inside = False
    for event in events:
        if event.get("event") == "started":
            inside = whole(event, "attempt") == attempt
        elif inside:
            yield event


def _balanced(event: Mapping[str, Any]) -> Incident:
    said = text(event, "reason")
    return Incident(what="the ranks' shares changed", step=whole(event, "step"), lines=(said,) if said else ())


def _less_memory(event: Mapping[str, Any]) -> Incident:
    choices = mapping(event, "choices")
    lines = [
        f"{key} = {choices[key].get('value')}  ({choices[key].get('reason')})"
        for key in choices
        if isinstance(choices[key], dict)
    ]
    return Incident(
        what="memory ran out: the layout changed to one that needs less",
        attempt=whole(event, "attempt"),
        lines=tuple(lines),
        bad=True,
    )


def alarms(folder: RunFolder, until_s: float | None) -> Iterator[Incident]:
    """Yield what the sampler raised alerts about, one incident for all alerts of a rule on the same thing."""
    found: dict[tuple[str | None, ...], _Alarm] = {}
    for path in sorted(folder.path.glob("alerts*.jsonl")):
        for alert in records.read(path):
            time_s = number(alert, "time_s")
            if time_s is None:
                continue
            key = tuple(text(alert, name) for name in ("node", "rule", "subject"))
            if alert.get("state") == "fired":
                since_s = number(alert, "since_s") or time_s
                severity = text(alert, "severity") or "warning"
                alarm = found.setdefault(key, _Alarm("", "", severity, since_s, None))
                alarm.what, alarm.advice = text(alert, "what") or str(key[1]), text(alert, "advice") or ""
                alarm.since_s, alarm.times = since_s, alarm.times + 1
            elif key in found and found[key].since_s is not None:
                found[key].lasted_s += time_s - (found[key].since_s or time_s)
                found[key].since_s = None
    for alarm in sorted(found.values(), key=lambda alarm: alarm.first_s):
        stood_to_the_end = alarm.since_s is not None
        lasted_s = alarm.lasted_s
        if alarm.since_s is not None and until_s is not None:
            lasted_s += max(0.0, until_s - alarm.since_s)
        times = "once" if alarm.times == 1 else f"{alarm.times:,} times"
        ended = ", still at the end" if stood_to_the_end else ""
        how_long = f"{times}, {lasted_s:,.0f} s in all{ended}"
        word = "alert" if alarm.severity == "warning" else "note"
        lines = tuple(line for line in (how_long, alarm.advice) if line)
        yield Incident(what=f"{word}: {alarm.what}", time_s=alarm.first_s, lines=lines, bad=word == "alert")
