"""From all that was seen to the one cause: what follows from something else is set aside, the rest is ordered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from trainwright.doctor.causes import Cause, Level
from trainwright.doctor.scan import Scan, Sighting

_LEVELS: Final[dict[Level, int]] = {"proof": 0, "failure": 1, "general": 2}
_BY_SIGNAL: Final = ("killed-from-outside", "segfault", "bus-error")
_REQUEUED: Final = ("slurm/preempted", "slurm/node-fail", "slurm/time-limit")
_LAST_WORDS: Final = ("exited", "abort", "terminated")
STEPS_AFTER: Final = 3
"""Losses told after a message; the run then went on, and the message was no end of it."""
LINES_OF_A_REASON: Final = 3
"""`terminate called after throwing an instance of ...` is followed by `what(): ...`."""


@dataclass(frozen=True)
class Resolved:
    """What ended the run, or None; what it did to others; and what was said without ending anything."""

    cause: Sighting | None
    also: tuple[Sighting, ...]
    """Other candidates that nothing explains: with any, the cause is not certain."""
    collateral: tuple[Sighting, ...]
    asides: tuple[Sighting, ...]


_Role = Literal["ended", "collateral", "aside", "context"]


def resolve(scans: Sequence[Scan]) -> Resolved:
    """Choose by causality: proof before message before how a process ended, the specific before the general, then
    the earliest; a rank that was killed before the exceptions of those who noticed (facts of launch.failures)."""
    by_role: dict[_Role, list[Sighting]] = {"ended": [], "collateral": [], "aside": [], "context": []}
    for scan in scans:
        for sighting in scan.sightings:
            by_role[_role_of(sighting, scan)].append(sighting)
    ended, collateral = _without_followers(by_role["ended"], by_role["collateral"])
    asides = _first_of_each(by_role["aside"])
    standing = _unexplained(ended)
    if not standing:
        return Resolved(None, (), tuple(collateral), asides)
    cause = standing[0]
    level = cause.cause.level
    also = [s for s in standing if s.cause.level == level and s.cause.id != cause.cause.id and level == "failure"]
    explained = [sighting for sighting in ended if sighting not in standing]
    return Resolved(cause, _first_of_each(also), (*explained, *collateral), asides)


def _role_of(sighting: Sighting, scan: Scan) -> _Role:
    cause = sighting.cause
    if cause.level == "context" or cause.level == "collateral":
        return cause.level
    survived = _may_be_survived(cause) and went_on(sighting, scan)
    return "aside" if cause.level == "warning" or survived else "ended"


def _without_followers(
    ended: Sequence[Sighting], collateral: Sequence[Sighting]
) -> tuple[list[Sighting], list[Sighting]]:
    """Return both without an exception that is the collateral itself, and with aborts among what they follow."""
    places = {(sighting.log, sighting.order) for sighting in collateral}
    ended = [s for s in ended if s.cause.id != "exception" or (s.log, s.order) not in places]
    by_watchdog = [s for s in ended if s.cause.id == "abort" and _follows_one(s, collateral)]
    return [s for s in ended if s not in by_watchdog], [*collateral, *by_watchdog]


def _unexplained(ended: Sequence[Sighting]) -> list[Sighting]:
    """Return those that no other explains, the likeliest cause first."""
    covered = {covers for sighting in ended for covers in sighting.cause.covers}
    return sorted((s for s in ended if s.cause.id not in covered or _covers_itself(s, ended)), key=_rank_of)


def _may_be_survived(cause: Cause) -> bool:
    """Whether training that goes on acquits it: not what lasts, but what a batch system does before it requeues."""
    return cause.level != "proof" or cause.id in _REQUEUED


def went_on(sighting: Sighting, scan: Scan) -> bool:
    """Say whether training went on, or ended well, after it."""
    if scan.completed_at is not None and scan.completed_at > sighting.order:
        return True
    return scan.losses.count - sighting.losses_before >= STEPS_AFTER


def _follows_one(abort: Sighting, collateral: Sequence[Sighting]) -> bool:
    """Whether a process aborted because others were missing: its log says that before, or as the reason."""
    return any(s.log == abort.log and s.order <= abort.order + LINES_OF_A_REASON for s in collateral)


def _covers_itself(sighting: Sighting, ended: Sequence[Sighting]) -> bool:
    """Whether nothing but causes that it explains in its turn would explain it."""
    above = [other for other in ended if sighting.cause.id in other.cause.covers]
    return all(other.cause.id in sighting.cause.covers for other in above)


def _rank_of(sighting: Sighting) -> tuple[int, int, bool, int]:
    cause = sighting.cause
    manner = 0 if cause.id in _BY_SIGNAL else 2 if cause.id in _LAST_WORDS else 1
    # The launcher's record repeats what a rank said; it stands in only where the rank's log has lost it.
    record = sighting.log.endswith(".jsonl")
    return _LEVELS[cause.level], manner if cause.level == "general" else 0, record, sighting.order


def _first_of_each(sightings: Sequence[Sighting]) -> tuple[Sighting, ...]:
    first: dict[str, Sighting] = {}
    for sighting in sightings:
        first.setdefault(sighting.cause.id, sighting)
    return tuple(first.values())
