"""All that was read of one run, before its cause is known: what every rule that looks for the cause asks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.doctor.causes import causes
from trainwright.doctor.collectives import Collectives
from trainwright.doctor.finding import Confidence, Evidence, Finding
from trainwright.doctor.fixes import fixes_of, run_fields, title_of
from trainwright.doctor.inputs import Inputs, gather, last_failure
from trainwright.doctor.lines import shown
from trainwright.doctor.losses import Losses
from trainwright.doctor.sample_summary import SampleSummary, read_samples
from trainwright.doctor.scan import Scan, Sighting, scan_blocks, scan_log
from trainwright.runs import records
from trainwright.runs.values import number


@dataclass(frozen=True)
class Clues:
    """What the files of a run hold, each kind in the form in which it is asked."""

    inputs: Inputs
    scans: Sequence[Scan]
    failure: tuple[Path, dict[str, Any]] | None
    """The last failure that the launcher wrote down, with the file that has it."""
    samples: SampleSummary | None
    losses: Losses
    collectives: Collectives
    fields: Mapping[str, str]
    """What the titles and fixes of all causes may name."""

    def sightings(self, cause: str | None = None) -> Iterator[Sighting]:
        """Yield what all logs show, log by log; of one cause alone where its id is given."""
        for scan in self.scans:
            yield from (sighting for sighting in scan.sightings if cause in (None, sighting.cause.id))

    def rank_of_pid(self, pid: str | None) -> int | None:
        """Return the rank that had a pid, as torchrun told it."""
        return None if pid is None else next((s.ranks_by_pid[pid] for s in self.scans if pid in s.ranks_by_pid), None)

    def finding(
        self,
        id: str,
        evidence: Sequence[Evidence],
        fields: Mapping[str, str] | None = None,
        *,
        confidence: Confidence = "likely",
        rank: int | None = None,
    ) -> Finding:
        """Return a cause with its title and fixes in the words of this run; `fields` are known besides."""
        cause = causes()[id]
        known = {**self.fields, **{name: shown(value) for name, value in (fields or {}).items()}}
        return Finding(
            cause=id,
            title=title_of(cause, known),
            evidence=tuple(dict.fromkeys(evidence)),
            fixes=fixes_of(cause, known),
            confidence=confidence,
            rank=rank,
        )


def gather_clues(paths: Sequence[Path]) -> Clues:
    """Read a run folder, logs, or folders of logs.

    Raises:
        UserError: a path is not there, or there is nothing to read.
    """
    inputs = gather(paths)
    exception = causes()["exception"]
    scans = [scan_log(path, name, exception) for path, name in inputs.logs]
    failure = last_failure(inputs.events)
    if failure is not None and failure[1].get("text"):
        lines = str(failure[1]["text"]).encode().split(b"\n")
        blocks = [(range(1, len(lines) + 1), lines)]
        rank = failure[1].get("rank")
        scans.append(scan_blocks(blocks, failure[0].name, exception, rank if isinstance(rank, int) else None))
    return Clues(
        inputs=inputs,
        scans=scans,
        failure=failure,
        samples=read_samples(inputs.samples),
        losses=_longest([*(scan.losses for scan in scans), *map(_recorded_losses, inputs.metrics)]),
        collectives=_collectives_in(inputs, scans),
        fields=run_fields(inputs.run, scans),
    )


def _collectives_in(inputs: Inputs, scans: Sequence[Scan]) -> Collectives:
    collectives = Collectives()
    for scan in scans:
        for place, line in scan.words:
            collectives.add_words(place, line)
    for path, name in inputs.flight_records:
        collectives.add_flight_record(path, name)
    for path, name in inputs.stacks:
        collectives.add_stack(path, name)
    return collectives


def _longest(courses: Sequence[Losses]) -> Losses:
    return max(courses, key=lambda losses: losses.count, default=Losses())


def _recorded_losses(path: Path) -> Losses:
    """Return the losses of the last attempt in metrics.jsonl, where null stands for one that is not finite."""
    losses, attempt = Losses(), None
    for line, record in enumerate(records.read(path), 1):
        if record.get("kind") != "train":
            continue
        if record.get("attempt") != attempt:
            losses, attempt = Losses(), record.get("attempt")
        value = math.nan if record.get("loss") is None else number(record, "loss")
        if value is not None:
            losses.add(value, f"{path.name}:{line}")
    return losses
