"""What a log itself names as a cause, as a Finding: whose it is, where it was raised, which kind of memory ran out."""

from __future__ import annotations

from trainwright.doctor.clues import Clues
from trainwright.doctor.device_memory import DeviceMemory, kind_of
from trainwright.doctor.finding import UNDETERMINED, Confidence, Evidence, Finding
from trainwright.doctor.lines import shown
from trainwright.doctor.resolve import Resolved
from trainwright.doctor.scan import Sighting


def said_in_passing(clues: Clues, sighting: Sighting) -> Finding:
    """Return what a sign says that did not end the run."""
    rank = _rank_by_its_line(clues, sighting)
    return clues.finding(
        sighting.cause.id,
        [sighting.evidence],
        _fields_of(sighting, rank),
        confidence=_confidence_in(sighting),
        rank=rank,
    )


def said_as_cause(clues: Clues, cause: Sighting, resolved: Resolved) -> Finding:
    """Return what ended the run by its own words, with all that other lines tell of it."""
    if cause.cause.id.startswith("host-oom"):
        return _host_memory(clues, cause)
    if cause.cause.id == "exception" and _failed_in_a_library(cause):
        return _unknown_exception(cause)
    rank = _rank_by_its_line(clues, cause)
    rank = _rank_by_other_lines(clues, cause) if rank is None else rank
    id, fields, evidence = cause.cause.id, _fields_of(cause, rank), [cause.evidence]
    if cause.where is not None:
        evidence.append(Evidence(cause.place, f"raised at {fields['where']}"))
    if id == "device-oom":
        memory = _device_memory(clues, cause, fields.pop("message", cause.text))
        id = memory.cause
        evidence.append(Evidence(cause.place, memory.said))
        fields["kill_others"] = "kill " + " ".join(map(str, memory.pids)) if memory.pids else "end them"
    confidence = "likely" if resolved.also else _confidence_in(cause)
    return clues.finding(id, evidence, fields, confidence=confidence, rank=rank)


def _confidence_in(sighting: Sighting) -> Confidence:
    return "likely" if sighting.cause.level == "general" else "certain"


def _fields_of(sighting: Sighting, rank: int | None) -> dict[str, str]:
    """Return what the sign tells, with the place that raised it and who it was."""
    fields = dict(sighting.fields)
    if sighting.where is not None:
        fields["where"] = shown(str(sighting.where))
    if fields.get("rank"):
        fields["who"] = f"rank {fields['rank']}"
    if sighting.cause.id == "rank-missing" and rank is None:
        fields.setdefault("who", "a node or rank")
    return fields


def _rank_by_its_line(clues: Clues, sighting: Sighting) -> int | None:
    return clues.rank_of_pid(sighting.fields.get("pid")) if sighting.told_rank is None else sighting.told_rank


def _rank_by_other_lines(clues: Clues, sighting: Sighting) -> int | None:
    """Return the rank of which another line says the same, which is missing by the others, or failed first."""
    ranks = [other.told_rank for other in clues.sightings() if other.cause is sighting.cause]
    of_gpu = sighting.cause.id.startswith("gpu-")
    if of_gpu and (missing := clues.collectives.missing()) is not None and len(missing.ranks) == 1:
        ranks.append(missing.ranks[0])
    if of_gpu or sighting.cause.level != "proof":
        ranks += [scan.root_rank for scan in clues.scans]
    return next((rank for rank in ranks if rank is not None), None)


def _device_memory(clues: Clues, sighting: Sighting, message: str) -> DeviceMemory:
    """Return which kind ran out, by the first line of the same log that has a stack."""
    scan = next(scan for scan in clues.scans if scan.name == sighting.log)
    listed = [process for each in clues.scans for process in each.gpu_processes]
    with_stack = (other for other in scan.sightings if other.cause is sighting.cause and other.frames)
    return kind_of(next(with_stack, sighting), scan, message, listed)


def _host_memory(clues: Clues, cause: Sighting) -> Finding:
    """Host memory: of a data-loading worker where the kernel's log or the dead worker's pid says so."""
    worker = _killed_worker(clues, cause)
    of_worker = worker is not None or cause.fields.get("process", "").startswith("pt_data_worker")
    evidence = [cause.evidence] if worker is None else [cause.evidence, worker.evidence]
    by_pid = clues.rank_of_pid(cause.fields.get("pid"))
    ranks = (cause.rank, by_pid, None if worker is None else worker.rank)
    return clues.finding(
        "host-oom/worker" if of_worker else cause.cause.id,
        evidence,
        cause.fields,
        confidence="certain",
        rank=next((rank for rank in ranks if rank is not None), None),
    )


def _killed_worker(clues: Clues, cause: Sighting) -> Sighting | None:
    """Return where the death of a data-loading worker is told that the kernel's kill explains."""
    pid = cause.fields.get("pid")
    if pid is not None:
        for died in clues.sightings("data-loader-worker-died"):
            if pid in died.fields.get("pid", ""):
                return died
    if cause.cause.level != "proof" or clues.rank_of_pid(pid) is not None:
        return None
    # Of a container the kernel's log has another pid.
    return next((s for s in clues.sightings() if "DataLoader worker" in s.text and "signal: Killed" in s.text), None)


def _failed_in_a_library(sighting: Sighting) -> bool:
    """Whether a library failed; one that refuses what it was given (ValueError and the like) says why itself."""
    error = sighting.fields.get("error", "")
    return bool(sighting.frames) and not sighting.frames[-1].own and error.startswith(("RuntimeError", "OSError"))


def _unknown_exception(sighting: Sighting) -> Finding:
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
