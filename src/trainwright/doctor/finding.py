"""A Finding: one cause, what shows it, and what mends it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final, Literal

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
