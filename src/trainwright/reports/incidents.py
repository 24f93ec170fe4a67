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
    """All alerts of a rule on the same thing."""

    severity: str
    first_s: float
    what: str = ""
    advice: str = ""
    since_s: float | None = None
    """None while it does not stand."""
    times: int = 0
    lasted_s: float = 0.0

    def fire(self, alert: Mapping[str, Any], since_s: float) -> None:
        """Take an alert that was raised."""
        self.what, self.advice = text(alert, "what") or str(text(alert, "rule")), text(alert, "advice") or ""
        self.since_s, self.times = since_s, self.times + 1

    def clear(self, time_s: float) -> None:
        """Take that it passed, if it stood."""
        if self.since_s is not None:
            self.lasted_s += time_s - self.since_s
            self.since_s = None

    def incident(self, until_s: float | None) -> Incident:
        """Return it as one incident; `until_s` is the end of the run, for one that still stands."""
        lasted_s, ended = self.lasted_s, ""
        if self.since_s is not None:
            ended = ", still at the end"
            lasted_s += 0.0 if until_s is None else max(0.0, until_s - self.since_s)
        times = "once" if self.times == 1 else f"{self.times:,} times"
        lines = tuple(line for line in (f"{times}, {lasted_s:,.0f} s in all{ended}", self.advice) if line)
        word = "alert" if self.severity == "warning" else "note"
        return Incident(what=f"{word}: {self.what}", time_s=self.first_s, lines=lines, bad=word == "alert")


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
        numbers = ", ".join(f"{step:,}" for step in steps.not_finite)
        yield Incident(what=f"the loss was not finite at step {numbers}", step=steps.not_finite[0], bad=True)
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
    raised: dict[tuple[str | None, ...], _Alarm] = {}
    for path in sorted(folder.path.glob("alerts*.jsonl")):
        for alert in records.read(path):
            time_s = number(alert, "time_s")
            if time_s is None:
                continue
            key = tuple(text(alert, name) for name in ("node", "rule", "subject"))
            if alert.get("state") == "fired":
                since_s = number(alert, "since_s") or time_s
                alarm = raised.setdefault(key, _Alarm(text(alert, "severity") or "warning", since_s))
                alarm.fire(alert, since_s)
            elif key in raised:
                raised[key].clear(time_s)
    yield from (alarm.incident(until_s) for alarm in sorted(raised.values(), key=lambda alarm: alarm.first_s))
