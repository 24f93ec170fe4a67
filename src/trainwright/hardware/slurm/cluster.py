"""What a Slurm cluster has and who uses it, as it was when it was read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, Final

_GONE: Final = frozenset(
    {"DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "FUTURE", "INVAL", "INVALID_REG", "UNKNOWN"}
)
_NOT_NOW: Final = frozenset(
    {"MAINT", "MAINTENANCE", "RESERVED", "NOT_RESPONDING", "POWERING_DOWN", "REBOOT_ISSUED", "REBOOT_REQUESTED"}
)


@dataclass(frozen=True, kw_only=True)
class NodeGpus:
    """GPUs of one type on a node; `type` is spelled as the cluster spells it, None where it gives none."""

    type: str | None
    count: int
    used: int


@dataclass(frozen=True, kw_only=True)
class SlurmNode:
    """One node; `states` are Slurm's words (`MIXED`, `DRAIN`), `memory_mib` is what jobs can be given in all."""

    name: str
    gpus: tuple[NodeGpus, ...]
    cores: int
    cores_used: int
    memory_mib: int
    memory_used_mib: int
    features: tuple[str, ...]
    states: tuple[str, ...]
    reason: str | None
    partitions: tuple[str, ...]

    @property
    def in_service(self) -> bool:
        """Whether jobs will get this node without an administrator's act."""
        return not _GONE & set(self.states)

    @property
    def gives_now(self) -> bool:
        """Whether a job could start here at this moment, if what it asks for is free."""
        return self.in_service and not _NOT_NOW & set(self.states)

    @property
    def gpu_count(self) -> int:
        """GPUs of all types."""
        return sum(gpus.count for gpus in self.gpus)

    def free(self, gpus: NodeGpus) -> int:
        """GPUs of one entry that no job has, 0 where none can start."""
        return gpus.count - gpus.used if self.gives_now else 0


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A queue with its limits; None: no limit, or the cluster's."""

    name: str
    is_default: bool
    is_up: bool
    max_time_min: int | None
    default_time_min: int | None
    max_nodes: int | None
    max_cores_per_node: int | None
    max_memory_per_node_mib: int | None


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job that runs or waits; `gpus` of all its nodes, None where it does not say. `start` is Slurm's text."""

    job_id: str
    user: str
    state: str
    partition: str
    gpus: int | None
    nodes: int
    reason: str
    start: str | None


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Nodes kept for maintenance or for others, as Slurm writes times and nodes."""

    name: str
    start: str
    end: str
    nodes: str
    is_maintenance: bool


@dataclass(frozen=True, kw_only=True)
class Quota:
    """A limit of one of the user's accounts; `limit` is Slurm's text (`gres/gpu=8`)."""

    account: str
    name: str
    limit: str


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All of it; `user` is who reads, `quotas` is None where accounting does not tell."""

    name: str
    version: str
    user: str
    nodes: tuple[SlurmNode, ...]
    partitions: tuple[Partition, ...]
    jobs: tuple[QueuedJob, ...]
    reservations: tuple[Reservation, ...]
    quotas: tuple[Quota, ...] | None

    def nodes_of(self, partition: str) -> tuple[SlurmNode, ...]:
        """Return the nodes of a partition that are in service and have GPUs."""
        return tuple(n for n in self.nodes if partition in n.partitions and n.in_service and n.gpu_count)

    @property
    def gpu_types(self) -> tuple[str | None, ...]:
        """Types of GPU that any node has, in the order of the nodes."""
        return tuple(dict.fromkeys(gpus.type for node in self.nodes for gpus in node.gpus))

    def waiting(self, partition: str) -> tuple[QueuedJob, ...]:
        """Return the jobs that wait in a partition."""
        return tuple(job for job in self.jobs if job.state == "PENDING" and partition in job.partition.split(","))

    def to_json(self) -> dict[str, Any]:
        """Return plain data, sorted by name."""
        plain = asdict(self)
        keys = {"nodes": "name", "partitions": "name", "jobs": "job_id", "reservations": "name"}
        for name, key in keys.items():
            plain[name] = sorted(plain[name], key=itemgetter(key))
        in_service = {node.name: node.in_service for node in self.nodes}
        plain["nodes"] = [record | {"in_service": in_service[record["name"]]} for record in plain["nodes"]]
        return plain


def gpus_by_type(nodes: Iterable[SlurmNode]) -> dict[str | None, tuple[int, int]]:
    """Return for each type how many GPUs these nodes have, and how many of them are free now."""
    counts: dict[str | None, tuple[int, int]] = {}
    for node in nodes:
        for gpus in node.gpus:
            count, free = counts.get(gpus.type, (0, 0))
            counts[gpus.type] = (count + gpus.count, free + node.free(gpus))
    return counts
