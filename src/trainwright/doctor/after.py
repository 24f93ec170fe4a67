"""The one cause of what went wrong in a run: read everything, resolve, refine, and say what mends it."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trainwright.doctor.causes import causes
from trainwright.doctor.collectives import Collectives, Missing
from trainwright.doctor.device_memory import kind_of
from trainwright.doctor.finding import HEALTHY, UNDETERMINED, Confidence, Diagnosis, Evidence, Finding
from trainwright.doctor.fixes import fixes_of, run_fields, title_of
from trainwright.doctor.inputs import Inputs, gather, last_failure, stored
from trainwright.doctor.lines import shown
from trainwright.doctor.live import LiveStatus, standing
from trainwright.doctor.losses import Losses, LossTrend, course_of
from trainwright.doctor.resolve import Resolved, resolve
from trainwright.doctor.sample_summary import Seen, failures_in, read_samples, slowness_in
from trainwright.doctor.scan import Scan, Sighting, scan_blocks, scan_log
from trainwright.launch.hangs.fault import Hang
from trainwright.runs import records
from trainwright.runs.values import number

MOST_SHOWN: Final = 6
MANY_NANS: Final = 5
NEAR_THE_END: Final = 0.8
_BY_SIGNAL: Final[dict[int, str]] = {
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
    inputs = gather(paths)
    exception = causes()["exception"]
    scans = [scan_log(path, name, exception) for path, name in inputs.logs]
    failed = last_failure(inputs.events)
    if failed is not None and failed[1].get("text"):
        lines = str(failed[1]["text"]).encode().split(b"\n")
        blocks = [(range(1, len(lines) + 1), lines)]
        rank = failed[1].get("rank")
        scans.append(scan_blocks(blocks, failed[0].name, exception, rank if isinstance(rank, int) else None))
    return replace(_Diagnosing(inputs, scans, failed).diagnosis(), read=inputs.names)


class _Diagnosing:
    """What is known of one run while its cause is looked for."""

    def __init__(self, inputs: Inputs, scans: list[Scan], failed: tuple[Path, dict[str, Any]] | None) -> None:
        self._inputs = inputs
        self._scans = scans
        self._failed = failed
        self._fields = run_fields(inputs.run, scans)
        self._samples = read_samples(inputs.samples)
        self._losses = _longest([*(scan.losses for scan in scans), *map(_recorded, inputs.metrics)])
        self._collectives = Collectives()
        for scan in scans:
            for place, line in scan.words:
                self._collectives.add_words(place, line)
        for path, name in inputs.flight_records:
            self._collectives.add_flight_record(path, name)
        for path, name in inputs.stacks:
            self._collectives.add_stack(path, name)

    def diagnosis(self) -> Diagnosis:
        now = None if self._inputs.run is None else standing(self._inputs.run)
        if (hung := self._stands_still(now)) is not None:
            return Diagnosis(finding=hung)
        resolved = resolve(self._scans)
        asides = tuple(self._seen_in_log(sighting) for sighting in resolved.asides)
        if (finding := self._ended(resolved)) is not None:
            collateral = tuple(dict.fromkeys(sighting.evidence for sighting in resolved.collateral))[:MOST_SHOWN]
            others = tuple(self._seen_in_log(sighting) for sighting in resolved.also)
            return Diagnosis(finding=finding, collateral=collateral, asides=(*others, *asides))
        went_badly = [*self._courses(), *self._slowness()]
        if went_badly:
            return Diagnosis(finding=went_badly[0], asides=(*went_badly[1:], *asides))
        if now is not None:
            return Diagnosis(finding=_healthy(Evidence("ranks", now.text)), asides=asides)
        if (ended := self._came_to_its_end()) is not None:
            return Diagnosis(finding=_healthy(ended), asides=asides)
        warned = [finding for finding in asides if causes()[finding.cause].level == "warning"]
        if warned:
            others = tuple(finding for finding in asides if finding is not warned[0])
            return Diagnosis(finding=replace(warned[0], confidence="likely"), asides=others)
        return Diagnosis(finding=self._undetermined(resolved), asides=asides)

    def _ended(self, resolved: Resolved) -> Finding | None:
        """Return what ended the run: as the kernel counted it, as it said itself, or as its collectives show."""
        counted = next(failures_in(self._samples), None) if self._samples else None
        signalled = self._by_signal()
        cause = resolved.cause
        said = cause is not None and cause.cause.level != "general"
        if counted is not None and not said and (signalled is not None or cause is not None):
            return self._seen(counted, "certain")
        if cause is not None and (said or signalled is None):
            return (
                self._worker_or(cause) if cause.cause.id.startswith("host-oom") else self._seen_in_log(cause, resolved)
            )
        if signalled is not None:
            return signalled
        return self._waited(resolved.collateral) if resolved.collateral else None

    def _by_signal(self) -> Finding | None:
        """Return the signal that ended a rank, as the launcher wrote it down."""
        if self._failed is None:
            return None
        path, failed = self._failed
        code = failed.get("exit_code")
        if not isinstance(code, int) or -code not in _BY_SIGNAL:
            return None
        cause, name = _BY_SIGNAL[-code], signal.Signals(-code).name
        text = f"rank {failed.get('rank')} was ended by {name} (attempt {failed.get('attempt')})"
        evidence = [Evidence(path.name, text)]
        if cause == "killed-from-outside" and self._samples and self._samples.oom_kills:
            evidence.append(Evidence(self._samples.place, "the kernel's oom_kill counter did not rise during the run"))
        rank = failed.get("rank")
        return self._finding(cause, evidence, {}, "likely", rank if isinstance(rank, int) else None)

    def _seen_in_log(self, sighting: Sighting, resolved: Resolved | None = None) -> Finding:
        fields = dict(sighting.fields)
        confidence: Confidence = "likely" if sighting.cause.level == "general" else "certain"
        if resolved is not None and resolved.also:
            confidence = "likely"
        evidence = [sighting.evidence]
        id = sighting.cause.id
        if sighting.where is not None:
            fields["where"] = shown(str(sighting.where))
            if resolved is not None:
                evidence.append(Evidence(sighting.place, f"raised at {fields['where']}"))
        rank = sighting.told_rank
        if rank is None:
            rank = self._rank_of_pid(fields.get("pid"))
        if rank is None and resolved is not None:
            rank = self._rank_told_elsewhere(sighting)
        if id == "exception" and resolved is not None and _failed_in_a_library(sighting):
            return self._unknown(sighting)
        if id == "device-oom" and resolved is not None:
            scan = next(scan for scan in self._scans if scan.name == sighting.log)
            listed = [process for each in self._scans for process in each.gpu_processes]
            told = (s for s in scan.sightings if s.cause is sighting.cause and s.frames)
            memory = kind_of(next(told, sighting), scan, fields.pop("message", sighting.text), listed)
            id = memory.cause
            evidence.append(Evidence(sighting.place, memory.said))
            fields["kill_others"] = "kill " + " ".join(map(str, memory.pids)) if memory.pids else "end them"
        if fields.get("rank"):
            fields["who"] = f"rank {fields['rank']}"
        if id == "rank-missing" and rank is None:
            fields.setdefault("who", "a node or rank")
        return self._finding(id, evidence, fields, confidence, rank)

    def _rank_told_elsewhere(self, sighting: Sighting) -> int | None:
        """Return the rank of which another line says the same, which is missing by the others, or failed first."""
        ranks = [s.told_rank for scan in self._scans for s in scan.sightings if s.cause is sighting.cause]
        of_gpu = sighting.cause.id.startswith("gpu-")
        if of_gpu and (missing := self._collectives.missing()) is not None and len(missing.ranks) == 1:
            ranks.append(missing.ranks[0])
        if of_gpu or sighting.cause.level != "proof":
            ranks += [scan.root_rank for scan in self._scans]
        return next((rank for rank in ranks if rank is not None), None)

    def _worker_or(self, cause: Sighting) -> Finding:
        """Host memory: of a data-loading worker where the kernel's log or the dead worker's pid says so."""
        of_worker = cause.fields.get("process", "").startswith("pt_data_worker")
        died = [s for scan in self._scans for s in scan.sightings if s.cause.id == "data-loader-worker-died"]
        pid = cause.fields.get("pid")
        match = next((s for s in died if pid is not None and pid in s.fields.get("pid", "")), None)
        if match is None and cause.cause.level == "proof" and self._rank_of_pid(pid) is None:
            # Of a container the kernel's log has another pid.
            said = (s for scan in self._scans for s in scan.sightings)
            match = next((s for s in said if "DataLoader worker" in s.text and "signal: Killed" in s.text), None)
        id = "host-oom/worker" if of_worker or match is not None else cause.cause.id
        evidence = [cause.evidence, *([match.evidence] if match is not None else [])]
        ranks = (cause.rank, self._rank_of_pid(pid), None if match is None else match.rank)
        rank = next((rank for rank in ranks if rank is not None), None)
        return self._finding(id, evidence, cause.fields, "certain", rank)

    def _rank_of_pid(self, pid: str | None) -> int | None:
        """Return the rank that had a pid, as torchrun told it."""
        told = (scan.ranks_by_pid[pid] for scan in self._scans if pid is not None and pid in scan.ranks_by_pid)
        return next(told, None)

    def _waited(self, collateral: Sequence[Sighting]) -> Finding | None:
        """Return who was missing, where all that is said is that some waited; None where nothing tells."""
        preparing = [s for scan in self._scans for s in scan.sightings if s.cause.id == "preparing"]
        timed_out = [s for s in collateral if s.cause.id == "collective-timeout"]
        if preparing and timed_out and self._losses.count == 0:
            waited = {s.rank for s in timed_out}
            rank = 0 if 0 not in waited and waited != {None} else preparing[0].rank
            return self._finding("slow-preparation", [preparing[0].evidence, timed_out[0].evidence], {}, "likely", rank)
        if (uneven := self._uneven()) is not None:
            return uneven
        if timed_out and (stuck := self._at_its_data()) is not None:
            return stuck
        missing = self._collectives.missing()
        if missing is not None:
            return self._missing(missing)
        apart = [s for s in collateral if s.cause.id == "mesh-failed"]
        if apart and self._losses.count == 0:
            return self._finding("network", [apart[0].evidence], {}, "likely", None)
        if {s.cause.id for s in collateral} <= {"aborted", "ranks-ended"}:
            aborted = [s for s in collateral if s.cause.id == "aborted"]
            rank = next((scan.root_rank for scan in self._scans if scan.root_rank is not None), None)
            return self._finding("abort", [s.evidence for s in aborted[:1]], {}, "likely", rank) if aborted else None
        return None

    def _at_its_data(self) -> Finding | None:
        """Return the rank that others waited for while it was out of batches, or stood in its data loader."""
        for scan in self._scans:
            for seen in scan.sightings:
                who = "a rank" if seen.rank is None else f"rank {seen.rank}"
                if seen.cause.id == "out-of-data":
                    return self._finding("uneven-data", [seen.evidence], {"who": who}, "likely", seen.rank)
                if seen.cause.id == "waits-for-data":
                    return self._finding("data-loader-stuck", [seen.evidence], {}, "likely", seen.rank)
        return None

    def _uneven(self) -> Finding | None:
        """Return the rank that had fewer batches than the others, where the ranks tell how many they have."""
        told = {rank: batch for scan in self._scans for rank, batch in scan.batches.items()}
        fewest = min(told, key=lambda rank: told[rank][1], default=None)
        if fewest is None or len({total for _, total in told.values()}) < 2:
            return None
        said = ", ".join(f"rank {rank} batch {done} of {total}" for rank, (done, total) in sorted(told.items())[:8])
        return self._finding("uneven-data", [Evidence("logs", said)], {"who": f"rank {fewest}"}, "likely", fewest)

    def _missing(self, missing: Missing) -> Finding:
        evidence = list(missing.evidence)
        if missing.mismatch:
            return self._finding("collective-mismatch", evidence, {}, "likely", None)
        who = "rank " + ", ".join(map(str, missing.ranks))
        if missing.stands_at is not None:
            evidence.append(Evidence("stack", f"{who} stands at {missing.stands_at}"))
        rank = missing.ranks[0] if len(missing.ranks) == 1 else None
        return self._finding("rank-missing", evidence, {"who": who}, "likely", rank)

    def _courses(self) -> Iterator[Finding]:
        course = course_of(self._losses) or self._no_numbers()
        if course is None:
            return
        nothing = [s for scan in self._scans for s in scan.sightings if s.cause.id == "no-trainable-parameters"]
        if course.cause == "loss-zero" and nothing:
            yield self._seen_in_log(nothing[0])
        else:
            yield self._finding(course.cause, [Evidence(course.place, course.text)], {}, "likely", None)

    def _no_numbers(self) -> LossTrend | None:
        """Return that figures, whatever their names, ended as NaN; where losses are told by name, those count."""
        for scan in self._scans if self._losses.count == 0 else ():
            if scan.nan_lines >= MANY_NANS and scan.last_nan > NEAR_THE_END * scan.lines:
                text = f"figures in {scan.nan_lines} lines are not numbers, up to the end of the log"
                return LossTrend("loss-nan", text, f"{scan.name}:{scan.last_nan}")
        return None

    def _slowness(self) -> Iterator[Finding]:
        for scan in self._scans:
            yield from (
                self._finding(cause, [Evidence(scan.name, text)], {}, "likely", None)
                for cause, text in scan.meters.slowness()
            )
        for seen in slowness_in(self._samples) if self._samples else ():
            yield self._seen(seen, "likely")

    def _stands_still(self, now: LiveStatus | None) -> Finding | None:
        """Return what holds up a run that stands still now, or what its launcher found before it ended such a one."""
        hang, place, fields = None, "", {}
        if now is not None and now.hang is not None:
            hang, place = now.hang, "ranks"
            fields = {} if now.pid is None else {"pid": str(now.pid)}
        elif self._inputs.hang is not None and self._failed is not None and "hang" in self._failed[1]:
            found = stored(self._inputs.hang)
            hang, place = (Hang.from_json(found) if found else None), self._inputs.hang.name
        if hang is None:
            return None
        fields["who"] = "rank " + ", ".join(map(str, hang.ranks)) if hang.ranks else "no single rank"
        evidence = [Evidence(place, shown(line)) for line in (hang.why, *hang.shown)]
        return self._finding(hang.kind, evidence, fields, "certain" if hang.ranks else "likely", hang.rank)

    def _came_to_its_end(self) -> Evidence | None:
        """Return what shows that the run finished, or stopped when asked to and saved; None where nothing does."""
        last = {record.get("event") for path in self._inputs.events for record in _last_events(path)}
        if self._failed is None and last & {"finished", "stopped"}:
            how = "the run came to its end" if "finished" in last else "the run was asked to stop, and saved"
            return Evidence("events.jsonl", how)
        ended = next((scan for scan in self._scans if scan.completed_at is not None), None)
        if ended is not None:
            return Evidence(f"{ended.name}:{ended.completed_at}", "the run came to its end")
        ended = next((scan for scan in self._scans if scan.ended_well_at is not None and scan.losses.count), None)
        if ended is not None:
            return Evidence(f"{ended.name}:{ended.ended_well_at}", "a process ended with exit status 0")
        left = next((scan for scan in self._scans if scan.left_at is not None and scan.losses.count), None)
        why = "the program came to its end without destroying its process group, which is harmless there"
        return None if left is None else Evidence(f"{left.name}:{left.left_at}", why)

    def _undetermined(self, resolved: Resolved) -> Finding:
        evidence = tuple(dict.fromkeys(sighting.evidence for sighting in resolved.collateral))[:MOST_SHOWN]
        step = max((scan.step or 0 for scan in self._scans), default=0)
        if not evidence:
            last = max(self._scans, key=lambda scan: scan.lines, default=None)
            where = f"step {step:,} was told last; " if step else ""
            if last is not None:
                evidence = (Evidence(f"{last.name}:{last.lines}", f"{where}the log ends here, without a word of why"),)
        if resolved.collateral:
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
        return Finding(cause=UNDETERMINED, title=title, evidence=evidence, fixes=collect, confidence="possible")

    def _unknown(self, sighting: Sighting) -> Finding:
        """Return what is known of an exception that a library raised, and that the table does not have."""
        asked = f"your line that led there: {shown(str(sighting.where))}"
        collect = (
            f"{asked}; print what it hands over, and compare the call with the documentation of the installed version",
            "look for the message in the issues of the package whose files the traceback ends in",
            "give the logs of all ranks as well: trainwright doctor FOLDER",
        )
        return Finding(
            cause=UNDETERMINED,
            title=f"a library raised what is not known here: {sighting.fields.get('error', '')}",
            evidence=(sighting.evidence, Evidence(sighting.place, asked)),
            fixes=collect,
            confidence="possible",
            rank=sighting.rank,
        )

    def _seen(self, seen: Seen, confidence: Confidence) -> Finding:
        fields = {} if seen.rank is None else {"who": f"rank {seen.rank}"}
        return self._finding(seen.cause, [Evidence(seen.place, seen.text)], fields, confidence, seen.rank)

    def _finding(
        self,
        id: str,
        evidence: Sequence[Evidence],
        fields: Mapping[str, str],
        confidence: Confidence,
        rank: int | None,
    ) -> Finding:
        cause = causes()[id]
        known = {**self._fields, **{name: shown(value) for name, value in fields.items()}}
        return Finding(
            cause=id,
            title=title_of(cause, known),
            evidence=tuple(dict.fromkeys(evidence)),
            fixes=fixes_of(cause, known),
            confidence=confidence,
            rank=rank,
        )


def _failed_in_a_library(sighting: Sighting) -> bool:
    """Whether a library failed; one that refuses what it was given (ValueError and the like) says why itself."""
    error = sighting.fields.get("error", "")
    return bool(sighting.frames) and not sighting.frames[-1].own and error.startswith(("RuntimeError", "OSError"))


def _healthy(why: Evidence) -> Finding:
    return Finding(cause=HEALTHY, title="nothing is wrong", evidence=(why,), fixes=("nothing needs to be done",))


def _last_events(path: Path) -> list[dict[str, Any]]:
    """Return the events since the last start of the run."""
    events: list[dict[str, Any]] = []
    for record in records.read(path):
        events = [record] if record.get("event") == "started" else [*events[-50:], record]
    return events


def _longest(found: Sequence[Losses]) -> Losses:
    return max(found, key=lambda losses: losses.count, default=Losses())


def _recorded(path: Path) -> Losses:
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
