"""From the text that Slurm's programs print to a Cluster; the same on 22.05 and 24.11, unlike their JSON.

All text is somebody's: a feature, a reason or a user may hold what a terminal would obey, so it is made printable here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from trainwright.hardware.reading import printable
from trainwright.hardware.slurm.cluster import Cluster, NodeGpus, Partition, QueuedJob, Quota, Reservation, SlurmNode

QUEUE_FORMAT: Final = "%i|%u|%T|%P|%b|%D|%r|%S"
QUOTA_FORMAT: Final = "Account,GrpTRES,MaxTRES,MaxJobs"

_KEY: Final = re.compile(r"(?:^|\s)([A-Z][A-Za-z:/]*)=")
_GPUS: Final = re.compile(r"(?:^|,)gpu:(?:(?P<type>\(null\)|[^:(),=]+):)?(?P<count>\d+)(?:\([^)]*\))?")
_JOB_GPUS: Final = re.compile(r"(?:^|[,:/])gpu(?::[^:,=]*[^:,=\d][^:,=]*)?(?:[:=](?P<count>\d+))?(?=,|$)")
_STATE_MARKS: Final = "*~#!%$@^-"


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What each program printed; `quotas` is None where there is no accounting."""

    config: str
    nodes: str
    partitions: str
    queue: str
    reservations: str
    quotas: str | None


def read_cluster(texts: Texts, user: str) -> Cluster:
    """Return what the texts say; a line that lacks something is read without it."""
    config = dict(_pairs(texts.config))
    return Cluster(
        name=config.get("ClusterName", "cluster"),
        version=config.get("SLURM_VERSION", "of an unknown version"),
        user=user,
        nodes=tuple(_node(line) for line in _records(texts.nodes, "NodeName=")),
        partitions=tuple(_partition(line) for line in _records(texts.partitions, "PartitionName=")),
        jobs=tuple(_jobs(texts.queue)),
        reservations=tuple(_reservation(line) for line in _records(texts.reservations, "ReservationName=")),
        quotas=None if texts.quotas is None else tuple(_quotas(texts.quotas)),
    )


def minutes(text: str) -> int | None:
    """Return a time limit in minutes, rounded up: `30`, `15:00`, `04:00:00`, `1-00:00:00`; None for no limit."""
    match = re.fullmatch(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})", text)
    if match is None:
        return None
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:
        hours, mins, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, mins, seconds = parts
    else:
        hours, mins, seconds = 0, *(*parts, 0)[:2]
    whole = (int(match["days"] or 0) * 24 + hours) * 60 + mins
    return whole + (1 if seconds else 0)


def _records(text: str, first: str) -> Iterator[dict[str, str]]:
    """Yield each record by key, whether Slurm wrote it on one line (`-o`) or on several."""
    for record in re.split(rf"^(?={first})", text, flags=re.MULTILINE):
        if record.startswith(first):
            yield _fields(" ".join(record.split("\n")))


def _fields(line: str) -> dict[str, str]:
    """Return `key=value` pairs; the first of a key counts.

    Values may hold blanks, and a reason whatever an administrator wrote, which is why all after it is its text.
    """
    line, _, reason = line.partition(" Reason=")
    keys = list(_KEY.finditer(line))
    values: dict[str, str] = {}
    for number, key in enumerate(keys):
        end = keys[number + 1].start() if number + 1 < len(keys) else len(line)
        values.setdefault(key[1], printable(line[key.end() : end].strip()))
    if reason:
        values["Reason"] = printable(re.sub(r"\s*\[[^\[\]]*@[^\[\]]*\].*$", "", reason).strip())
    return values


def _pairs(config: str) -> Iterator[tuple[str, str]]:
    for line in config.splitlines():
        key, equals, value = line.partition("=")
        if equals:
            yield key.strip(), printable(value.strip())


def _node(fields: Mapping[str, str]) -> SlurmNode:
    used = dict(_gpu_counts(fields.get("GresUsed", "")))
    states = [part for state in fields.get("State", "UNKNOWN").split("+") for part in _states(state)]
    return SlurmNode(
        name=fields["NodeName"],
        gpus=tuple(
            NodeGpus(type=kind, count=count, used=min(count, used.get(kind, 0)))
            for kind, count in _gpu_counts(fields.get("Gres", ""))
        ),
        cores=_number(fields, "CPUEfctv") or _number(fields, "CPUTot") or 1,
        cores_used=_number(fields, "CPUAlloc") or 0,
        memory_mib=_number(fields, "RealMemory") or 0,
        memory_used_mib=_number(fields, "AllocMem") or 0,
        features=_listed(fields.get("ActiveFeatures", "")),
        states=tuple(states),
        reason=fields.get("Reason"),
        partitions=_listed(fields.get("Partitions", "")),
    )


def _states(state: str) -> Iterator[str]:
    """The word without the marks behind it, of which `*` is a state of its own."""
    yield state.rstrip(_STATE_MARKS)
    if state.endswith("*"):
        yield "NOT_RESPONDING"


def _gpu_counts(gres: str) -> Iterator[tuple[str | None, int]]:
    for match in _GPUS.finditer(gres):
        yield (None if match["type"] in (None, "(null)") else match["type"]), int(match["count"])


def _partition(fields: Mapping[str, str]) -> Partition:
    return Partition(
        name=fields["PartitionName"],
        is_default=fields.get("Default") == "YES",
        is_up=fields.get("State") == "UP" and fields.get("RootOnly") != "YES",
        max_time_min=minutes(fields.get("MaxTime", "")),
        default_time_min=minutes(fields.get("DefaultTime", "")),
        max_nodes=_number(fields, "MaxNodes"),
        max_cores_per_node=_number(fields, "MaxCPUsPerNode"),
        max_memory_per_node_mib=_number(fields, "MaxMemPerNode"),
    )


def _jobs(text: str) -> Iterator[QueuedJob]:
    for line in text.splitlines():
        parts = [printable(part) for part in line.split("|")]
        if len(parts) != QUEUE_FORMAT.count("|") + 1:
            continue
        job_id, user, state, partition, gres, nodes, reason, start = parts
        count = int(nodes) if nodes.isdigit() else 1
        match = _JOB_GPUS.search(gres)
        yield QueuedJob(
            job_id=job_id,
            user=user,
            state=state,
            partition=partition,
            gpus=None if match is None else int(match["count"] or 1) * count,
            nodes=count,
            reason=reason,
            start=None if start in ("N/A", "Unknown", "") else start,
        )


def _reservation(fields: Mapping[str, str]) -> Reservation:
    return Reservation(
        name=fields["ReservationName"],
        start=fields.get("StartTime", "Unknown"),
        end=fields.get("EndTime", "Unknown"),
        nodes=fields.get("Nodes", ""),
        is_maintenance="MAINT" in fields.get("Flags", "").split(","),
    )


def _quotas(text: str) -> Iterator[Quota]:
    names = QUOTA_FORMAT.split(",")
    for line in text.splitlines():
        parts = [printable(part) for part in line.split("|")]
        if len(parts) == len(names):
            limits = zip(names[1:], parts[1:], strict=True)
            yield from (Quota(account=parts[0], name=name, limit=limit) for name, limit in limits if limit)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part and part != "(null)")


def _number(fields: Mapping[str, str], key: str) -> int | None:
    text = fields.get(key, "")
    return int(text) if text.isascii() and text.isdigit() else None
