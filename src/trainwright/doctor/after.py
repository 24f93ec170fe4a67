"""The one cause of what went wrong in a run: read everything, resolve, refine, and say what mends it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from trainwright.doctor.causes import causes
from trainwright.doctor.clues import Clues, gather_clues
from trainwright.doctor.finding import HEALTHY, UNDETERMINED, Confidence, Diagnosis, Evidence, Finding
from trainwright.doctor.inputs import stored
from trainwright.doctor.lines import shown
from trainwright.doctor.live import LiveStatus, standing
from trainwright.doctor.losses import LossTrend, course_of
from trainwright.doctor.resolve import Resolved, resolve
from trainwright.doctor.said import said_as_cause, said_in_passing
from trainwright.doctor.sample_summary import Seen, failures_in, slowness_in
from trainwright.doctor.waiting import whom_they_waited_for
from trainwright.launch.hangs.fault import Hang
from trainwright.runs import records

MOST_SHOWN: Final = 6
MANY_NANS: Final = 5
NEAR_THE_END: Final = 0.8
_CAUSE_OF_SIGNAL: Final[dict[int, str]] = {
    signal.SIGKILL: "killed-from-outside",
    signal.SIGSEGV: "segfault",
    signal.SIGBUS: "bus-error",
    signal.SIGTERM: "terminated",
    signal.SIGABRT: "abort",
}


def diagnose(paths: Sequence[Path]) -> Diagnosis:
    """Read a run folder, logs, or folders of logs, and return the one cause.

    Raises:
        UserError: a path is not there, or there is nothing to read.
    """
    clues = gather_clues(paths)
    now = None if clues.inputs.run is None else standing(clues.inputs.run)
    resolved = resolve(clues.scans)
    asides = tuple(said_in_passing(clues, sighting) for sighting in resolved.asides)
    case = _Case(clues, now, resolved, asides)
    diagnosis = next(diagnosis for rule in _RULES if (diagnosis := rule(case)) is not None)
    return replace(diagnosis, read=clues.inputs.names)


@dataclass(frozen=True)
class _Case:
    """What the rules judge: how the run does now (None where it is over), and what its logs come to."""

    clues: Clues
    now: LiveStatus | None
    resolved: Resolved
    asides: tuple[Finding, ...]
    """What was said without ending anything."""

    @property
    def collateral(self) -> tuple[Evidence, ...]:
        """What only followed, as much as is shown."""
        return tuple(dict.fromkeys(sighting.evidence for sighting in self.resolved.collateral))[:MOST_SHOWN]


def _stands_still(case: _Case) -> Diagnosis | None:
    """What holds up a run that stands still now, or what its launcher found before it ended such a one."""
    clues, now = case.clues, case.now
    hang, place, fields = None, "", {}
    if now is not None and now.hang is not None:
        hang, place = now.hang, "ranks"
        fields = {} if now.pid is None else {"pid": str(now.pid)}
    elif clues.inputs.hang is not None and clues.failure is not None and "hang" in clues.failure[1]:
        written = stored(clues.inputs.hang)
        hang, place = (Hang.from_json(written) if written else None), clues.inputs.hang.name
    if hang is None:
        return None
    fields["who"] = "rank " + ", ".join(map(str, hang.ranks)) if hang.ranks else "no single rank"
    evidence = [Evidence(place, shown(line)) for line in (hang.why, *hang.shown)]
    confidence: Confidence = "certain" if hang.ranks else "likely"
    return Diagnosis(finding=clues.finding(hang.kind, evidence, fields, confidence=confidence, rank=hang.rank))


def _ended(case: _Case) -> Diagnosis | None:
    """What ended the run: as the kernel counted it, as it said itself, or as its collectives show."""
    finding = _what_ended(case.clues, case.resolved)
    if finding is None:
        return None
    others = tuple(said_in_passing(case.clues, sighting) for sighting in case.resolved.also)
    return Diagnosis(finding=finding, collateral=case.collateral, asides=(*others, *case.asides))


def _what_ended(clues: Clues, resolved: Resolved) -> Finding | None:
    counted = next(failures_in(clues.samples), None) if clues.samples else None
    signalled = _by_signal(clues)
    cause = resolved.cause
    is_specific = cause is not None and cause.cause.level != "general"
    if counted is not None and not is_specific and (signalled is not None or cause is not None):
        return _sampled(clues, counted, "certain")
    if cause is not None and (is_specific or signalled is None):
        return said_as_cause(clues, cause, resolved)
    if signalled is not None:
        return signalled
    return whom_they_waited_for(clues, resolved.collateral) if resolved.collateral else None


def _by_signal(clues: Clues) -> Finding | None:
    """Return the signal that ended a rank, as the launcher wrote it down."""
    if clues.failure is None:
        return None
    path, failed = clues.failure
    code = failed.get("exit_code")
    if not isinstance(code, int) or -code not in _CAUSE_OF_SIGNAL:
        return None
    cause, name = _CAUSE_OF_SIGNAL[-code], signal.Signals(-code).name
    text = f"rank {failed.get('rank')} was ended by {name} (attempt {failed.get('attempt')})"
    evidence = [Evidence(path.name, text)]
    if cause == "killed-from-outside" and clues.samples and clues.samples.oom_kills:
        evidence.append(Evidence(clues.samples.place, "the kernel's oom_kill counter did not rise during the run"))
    rank = failed.get("rank")
    return clues.finding(cause, evidence, rank=rank if isinstance(rank, int) else None)


def _sampled(clues: Clues, seen: Seen, confidence: Confidence) -> Finding:
    fields = {} if seen.rank is None else {"who": f"rank {seen.rank}"}
    return clues.finding(seen.cause, [Evidence(seen.place, seen.text)], fields, confidence=confidence, rank=seen.rank)


def _went_badly(case: _Case) -> Diagnosis | None:
    """Losses that go wrong, else what makes the run slow: nothing ended it."""
    findings = [*_courses(case.clues), *_slowness(case.clues)]
    return Diagnosis(finding=findings[0], asides=(*findings[1:], *case.asides)) if findings else None


def _courses(clues: Clues) -> Iterator[Finding]:
    course = course_of(clues.losses) or _no_numbers(clues)
    if course is None:
        return
    nothing_to_train = next(clues.sightings("no-trainable-parameters"), None)
    if course.cause == "loss-zero" and nothing_to_train is not None:
        yield said_in_passing(clues, nothing_to_train)
    else:
        yield clues.finding(course.cause, [Evidence(course.place, course.text)])


def _no_numbers(clues: Clues) -> LossTrend | None:
    """Return that figures, whatever their names, ended as NaN; where losses are told by name, those count."""
    for scan in clues.scans if clues.losses.count == 0 else ():
        if scan.nan_lines >= MANY_NANS and scan.last_nan > NEAR_THE_END * scan.lines:
            text = f"figures in {scan.nan_lines} lines are not numbers, up to the end of the log"
            return LossTrend("loss-nan", text, f"{scan.name}:{scan.last_nan}")
    return None


def _slowness(clues: Clues) -> Iterator[Finding]:
    for scan in clues.scans:
        for cause, text in scan.meters.slowness():
            yield clues.finding(cause, [Evidence(scan.name, text)])
    for seen in slowness_in(clues.samples) if clues.samples else ():
        yield _sampled(clues, seen, "likely")


def _goes_on(case: _Case) -> Diagnosis | None:
    return None if case.now is None else _healthy(case, Evidence("ranks", case.now.text))


def _came_to_its_end(case: _Case) -> Diagnosis | None:
    """A run that finished, or stopped when asked to and saved."""
    end = _end_in_events(case.clues) or _end_in_logs(case.clues)
    return None if end is None else _healthy(case, end)


def _end_in_events(clues: Clues) -> Evidence | None:
    last = {record.get("event") for path in clues.inputs.events for record in _last_events(path)}
    if clues.failure is not None or not last & {"finished", "stopped"}:
        return None
    how = "the run came to its end" if "finished" in last else "the run was asked to stop, and saved"
    return Evidence("events.jsonl", how)


def _last_events(path: Path) -> list[dict[str, Any]]:
    """Return the events since the last start of the run."""
    events: list[dict[str, Any]] = []
    for record in records.read(path):
        events = [record] if record.get("event") == "started" else [*events[-50:], record]
    return events


def _end_in_logs(clues: Clues) -> Evidence | None:
    with_losses = [scan for scan in clues.scans if scan.losses.count]
    not_destroyed = "the program came to its end without destroying its process group, which is harmless there"
    ends = (
        *((scan.name, scan.completed_at, "the run came to its end") for scan in clues.scans),
        *((scan.name, scan.ended_well_at, "a process ended with exit status 0") for scan in with_losses),
        *((scan.name, scan.left_at, not_destroyed) for scan in with_losses),
    )
    return next((Evidence(f"{name}:{line}", how) for name, line, how in ends if line is not None), None)


def _healthy(case: _Case, why: Evidence) -> Diagnosis:
    finding = Finding(cause=HEALTHY, title="nothing is wrong", evidence=(why,), fixes=("nothing needs to be done",))
    return Diagnosis(finding=finding, asides=case.asides)


def _warned(case: _Case) -> Diagnosis | None:
    """The first warning, where nothing shows that the run came to its end."""
    warning = next((finding for finding in case.asides if causes()[finding.cause].level == "warning"), None)
    if warning is None:
        return None
    others = tuple(finding for finding in case.asides if finding is not warning)
    return Diagnosis(finding=replace(warning, confidence="likely"), asides=others)


def _undetermined(case: _Case) -> Diagnosis:
    """What was said of the others, else where the log ends, and what to collect."""
    evidence = case.collateral or _end_of_the_log(case.clues)
    if case.resolved.collateral:
        collect = (
            "the logs of all ranks and of the other nodes: torchrun --log-dir logs --redirects 3 --tee 3",
            "who was missing: run again with TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1",
            "while it hangs: py-spy dump --pid PID of every rank",
        )
    else:
        collect = (
            "the end of stderr (slurm-JOB.err), and the exit status: sacct -j JOB --format=JobID,State,ExitCode",
            "the kernel's log of that time: dmesg -T | grep -i -E 'oom|killed process|xid'",
            "with PYTHONFAULTHANDLER=1 the next failure leaves a stack; give all files: trainwright doctor FOLDER",
        )
    title = "the evidence does not decide the cause"
    finding = Finding(cause=UNDETERMINED, title=title, evidence=evidence, fixes=collect, confidence="possible")
    return Diagnosis(finding=finding, asides=case.asides)


def _end_of_the_log(clues: Clues) -> tuple[Evidence, ...]:
    """Return where the longest log ends, with the last step that any told."""
    longest = max(clues.scans, key=lambda scan: scan.lines, default=None)
    if longest is None:
        return ()
    step = max(scan.step or 0 for scan in clues.scans)
    where = f"step {step:,} was told last; " if step else ""
    return (Evidence(f"{longest.name}:{longest.lines}", f"{where}the log ends here, without a word of why"),)


_RULES: Final[tuple[Callable[[_Case], Diagnosis | None], ...]] = (
    _stands_still,
    _ended,
    _went_badly,
    _goes_on,
    _came_to_its_end,
    _warned,
    _undetermined,
)
"""Tried in this order; the first that answers wins, and the last always does."""
