"""Which alerts stand: a condition fires once, and again only after it was over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trainwright.runs.values import of_kind
from trainwright.watch import formatting
from trainwright.watch.alerts.conditions import Condition, Severity
from trainwright.watch.samples import SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One change: a condition that fired, or one that is over. Times are seconds since the epoch."""

    time_s: float
    state: Literal["fired", "cleared"]
    rule: str
    subject: str
    severity: Severity
    what: str
    advice: str
    figures: Mapping[str, Any]
    threshold: Mapping[str, float]
    since_s: float
    node: str | None = None
    attempt: int | None = None

    @property
    def key(self) -> tuple[str | None, str, str]:
        """What makes two alerts the same."""
        return self.node, self.rule, self.subject

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Alert:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is no alert.
        """
        return of_kind(cls, data)


@dataclass
class _Course:
    since_s: float
    fired: bool = False


class ActiveAlerts:
    """Follows conditions over time and tells what changes."""

    def __init__(self, node: str | None = None, attempt: int | None = None, *, patient: bool = True) -> None:
        """Where it is not `patient`, a condition is told at once: a single look cannot wait to see whether it lasts."""
        self._node, self._attempt, self._patient = node, attempt, patient
        self._courses: dict[tuple[str, str], _Course] = {}

    def update(self, time_s: float, conditions: Iterable[Condition]) -> list[Alert]:
        """Return what fired and what is over since the last update; conditions not seen now stay as they were."""
        changes = []
        for condition in conditions:
            key = condition.rule, condition.subject
            course = self._courses.get(key)
            if condition.beyond:
                course = self._courses.setdefault(key, _Course(time_s))
                lasted = not self._patient or time_s - course.since_s >= condition.for_s
                if lasted and not course.fired:
                    course.fired = True
                    changes.append(self._alert("fired", time_s, course, condition))
            elif course is not None and (condition.back or not course.fired):
                del self._courses[key]
                if course.fired:
                    changes.append(self._alert("cleared", time_s, course, condition))
        return changes

    def _alert(self, state: Literal["fired", "cleared"], time_s: float, course: _Course, condition: Condition) -> Alert:
        return Alert(
            time_s=time_s,
            state=state,
            rule=condition.rule,
            subject=condition.subject,
            severity=condition.severity,
            what=condition.what,
            advice=condition.advice,
            figures=condition.figures,
            threshold=condition.threshold,
            since_s=course.since_s,
            node=self._node,
            attempt=self._attempt,
        )


def alert_line(alert: Alert) -> str:
    """Return the alert as one line of a log."""
    since = formatting.clock(alert.since_s)
    limits = [f"{name.replace('_', ' ')} {limit:.4g}" for name, limit in alert.threshold.items()]
    threshold = f" ({', '.join(limits)})" if limits else ""
    if alert.state == "cleared":
        return f"over: {alert.what}{threshold}; it began at {since}"
    word = "alert" if alert.severity == "warning" else "note"
    return f"{word}: {alert.what}{threshold}, since {since}: {alert.advice}"


def standing_after(alerts: Iterable[Alert]) -> list[Alert]:
    """Return those that fired and are not over, oldest first, given all changes in their order.

    What stood at the end of an attempt ended with it.
    """
    fired: dict[tuple[str | None, str, str], Alert] = {}
    for alert in alerts:
        if any(other.attempt != alert.attempt for other in fired.values()):
            fired.clear()
        if alert.state == "fired":
            fired[alert.key] = alert
        else:
            fired.pop(alert.key, None)
    return list(fired.values())
