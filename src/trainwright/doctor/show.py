"""A diagnosis and checks as text, safe for a terminal whatever the logs held."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.finding import HEALTHY, UNDETERMINED, Diagnosis, Finding
from trainwright.doctor.lines import shown


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
