"""A Finding: one cause, what shows it, and what mends it; as data, and as text that is safe for a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from trainwright.doctor.lines import shown

Confidence = Literal["certain", "likely", "possible"]
UNDETERMINED: Final = "undetermined"
HEALTHY: Final = "healthy"


@dataclass(frozen=True)
class Evidence:
    """Something that was said or measured, and where: `train.log:212`, `system.jsonl`, `GPU 0`."""

    place: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause by its id (`device-oom/later`), as in causes.yaml, or `undetermined`, or `healthy`.

    `fixes` come in the order to try; of an undetermined finding they are what to collect. `rank` is the one at fault.
    """

    cause: str
    title: str
    evidence: tuple[Evidence, ...] = ()
    fixes: tuple[str, ...] = ()
    confidence: Confidence = "certain"
    rank: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The one cause; what only followed from it; and what else is worth knowing and is not the cause."""

    finding: Finding
    collateral: tuple[Evidence, ...] = ()
    asides: tuple[Finding, ...] = ()
    read: tuple[str, ...] = ()
    """The files that were read."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with the version of its shape."""
        return {
            "schema_version": 1,
            "diagnosis": self.finding.to_json(),
            "collateral": [dataclasses.asdict(evidence) for evidence in self.collateral],
            "asides": [finding.to_json() for finding in self.asides],
            "read": list(self.read),
        }


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the cause, its evidence, and the fix; then, in short, what only followed and what else was seen."""
    finding = diagnosis.finding
    if finding.cause == HEALTHY:
        yield f"OK: {finding.title}"
    elif finding.cause == UNDETERMINED:
        yield f"Undetermined: {shown(finding.title)}"
    else:
        rank = f", rank {finding.rank}" if finding.rank is not None else ""
        yield f"Cause: {shown(finding.title)}"
        yield f"  [{finding.cause}, {finding.confidence}{rank}]"
    yield from _evidence(finding)
    if finding.fixes and finding.cause != HEALTHY:
        yield ""
        yield "To collect:" if finding.cause == UNDETERMINED else "Fix:"
        yield from (f"  {number}. {shown(fix, 600)}" for number, fix in enumerate(finding.fixes, 1))
    if diagnosis.collateral and finding.cause != UNDETERMINED:
        yield ""
        yield "Only followed from it:"
        yield from (f"  {shown(item.place)}  {shown(item.text, 160)}" for item in diagnosis.collateral)
    for aside in diagnosis.asides:
        places = ", ".join(dict.fromkeys(item.place for item in aside.evidence))
        yield f"Also seen, not the cause: {shown(aside.title)} ({shown(places)})"


def _evidence(finding: Finding) -> Iterator[str]:
    for item in finding.evidence:
        yield f"  {shown(item.place)}  {shown(item.text)}"
