"""A condition: something of which a threshold says whether it is as it should be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["warning", "note"]
"""A note is worth knowing and nothing is wrong: it stands in the views and goes to no command or webhook."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One thing as it is at one moment.

    `beyond` is past the threshold; `back` is on the good side of it by a margin, so that a value which trembles at the
    threshold is told once. Between the two nothing changes. It has to be beyond for `for_s` seconds to be told.
    """

    rule: str
    subject: str
    what: str
    advice: str
    beyond: bool
    back: bool
    figures: Mapping[str, float | int | str | None] = field(default_factory=dict)
    threshold: Mapping[str, float] = field(default_factory=dict)
    for_s: float = 0.0
    severity: Severity = "warning"


def above(
    value: float,
    limit: float,
    *,
    margin: float,
    name: str,
    rule: str,
    subject: str,
    what: str,
    advice: str,
    for_s: float = 0.0,
    severity: Severity = "warning",
) -> Condition:
    """Return the condition that `value` should not exceed `limit`; it is over once it is `margin` below."""
    return Condition(
        rule=rule,
        subject=subject,
        what=what,
        advice=advice,
        beyond=value > limit,
        back=value <= limit - margin,
        figures={name: round(value, 3)},
        threshold={"at_most": limit},
        for_s=for_s,
        severity=severity,
    )


def below(
    value: float,
    limit: float,
    *,
    margin: float,
    name: str,
    rule: str,
    subject: str,
    what: str,
    advice: str,
    for_s: float = 0.0,
    severity: Severity = "warning",
) -> Condition:
    """Return the condition that `value` should not fall under `limit`; it is over once it is `margin` above."""
    return Condition(
        rule=rule,
        subject=subject,
        what=what,
        advice=advice,
        beyond=value < limit,
        back=value >= limit + margin,
        figures={name: round(value, 3)},
        threshold={"at_least": limit},
        for_s=for_s,
        severity=severity,
    )
