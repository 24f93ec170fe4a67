"""What `gpus --slurm` prints, as a pure function from a Cluster to lines of text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from trainwright.hardware import catalog
from trainwright.hardware.slurm.cluster import Cluster, Partition, SlurmNode, gpus_by_type
from trainwright.hardware.slurm.gpu_types import assumptions, model_of

MOST_NODES: Final = 40
_MIB_PER_GIB: Final = 1024


def cluster_lines(cluster: Cluster, model_by_type: Mapping[str, str]) -> list[str]:
    """Return partitions, types of GPU, nodes, what is out of service, and what is assumed."""
    sections = (
        [f"Slurm cluster {cluster.name} ({cluster.version}), as it is now"],
        _partitions(cluster),
        _types(cluster, model_by_type),
        _nodes(cluster),
        _jobs(cluster),
        notes(cluster, model_by_type),
    )
    lines: list[str] = []
    for section in sections:
        section_lines = list(section)
        if section_lines:
            lines += ["", *section_lines] if lines else section_lines
    return lines


def cluster_document(cluster: Cluster, model_by_type: Mapping[str, str]) -> dict[str, Any]:
    """Return the same as plain data, with the model that each type is taken for."""
    plain = cluster.to_json()
    for record in plain["nodes"]:
        for gpus in record["gpus"]:
            gpus["model"] = dataclasses.asdict(model_of(gpus["type"], record["features"], model_by_type))
    return {"schema_version": 1, **plain}


def notes(cluster: Cluster, model_by_type: Mapping[str, str]) -> list[str]:
    """Return what a reader of any figure has to know: assumed models, nodes that are gone, maintenance, quotas."""
    sentences = [f"note: {sentence}" for sentence in assumptions(cluster, model_by_type)]
    for node in cluster.nodes:
        if node.gpu_count and not node.in_service:
            why = f": {node.reason}" if node.reason else ""
            sentences.append(f"note: {node.name} is out of service ({'+'.join(node.states)}){why}")
    for reservation in cluster.reservations:
        kept = "maintenance" if reservation.is_maintenance else "reserved"
        sentences.append(
            f"note: {kept} {reservation.start} to {reservation.end}: {reservation.nodes} ({reservation.name})"
        )
    for quota in cluster.quotas or ():
        sentences.append(f"note: your account {quota.account} has {quota.name} {quota.limit}")
    return sentences


def gpus_text(counts: Mapping[str | None, tuple[int, int]]) -> str:
    """Return types with their number and how many of them are free: `8 a100 (4 free), 4 v100 (0 free)`."""
    return ", ".join(f"{count} {kind or 'gpu'} ({free} free)" for kind, (count, free) in counts.items()) or "no GPU"


def limit_text(limit_min: int | None) -> str:
    """Return a time limit for people: `1 d`, `4 h`, `30 min`."""
    if limit_min is None:
        return "none"
    for unit, size in (("d", 24 * 60), ("h", 60)):
        if limit_min >= size and limit_min % size == 0:
            return f"{limit_min // size} {unit}"
    return f"{limit_min} min"


def table(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Return rows in aligned columns, the first of them the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def _partitions(cluster: Cluster) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("PARTITION", "TIME LIMIT", "NODES", "GPUS", "WAITING JOBS")]
    rows += [_partition(cluster, partition) for partition in cluster.partitions]
    yield from table(rows)


def _partition(cluster: Cluster, partition: Partition) -> tuple[str, ...]:
    nodes = cluster.nodes_of(partition.name)
    waiting = cluster.waiting(partition.name)
    wanted = sum(job.gpus or 0 for job in waiting)
    return (
        partition.name + ("*" if partition.is_default else "") + ("" if partition.is_up else " (closed)"),
        limit_text(partition.max_time_min),
        str(len(nodes)),
        gpus_text(gpus_by_type(nodes)),
        (f"{len(waiting)} for {wanted} GPUs" if wanted else str(len(waiting))) if waiting else "none",
    )


def _types(cluster: Cluster, model_by_type: Mapping[str, str]) -> Iterator[str]:
    rows: dict[tuple[str, ...], None] = {}
    for node in cluster.nodes:
        for gpus in node.gpus:
            model = model_of(gpus.type, node.features, model_by_type)
            gpu = None if model.key is None else catalog.catalog().gpus[model.key]
            memory = "?" if gpu is None or gpu.memory_gib is None else f"{gpu.memory_gib.value:.0f} GiB"
            name = "unknown" if gpu is None else gpu.name + (" (assumed)" if model.is_assumed else "")
            rows[(gpus.type or "(no type)", name, memory, model.reason)] = None
    if rows:
        yield from table([("TYPE", "MODEL", "MEMORY", "KNOWN BY"), *rows])


def _nodes(cluster: Cluster) -> Iterator[str]:
    with_gpus = [node for node in cluster.nodes if node.gpu_count]
    if not with_gpus:
        yield "no node has GPUs"
        return
    rows: list[tuple[str, ...]] = [("NODE", "STATE", "GPUS", "CORES FREE", "MEMORY FREE", "PARTITIONS", "FEATURES")]
    yield from table([*rows, *(_node(node) for node in with_gpus[:MOST_NODES])])
    if len(with_gpus) > MOST_NODES:
        yield f"and {len(with_gpus) - MOST_NODES} more: --json has them all"


def _node(node: SlurmNode) -> tuple[str, ...]:
    memory_free = (node.memory_mib - node.memory_used_mib) / _MIB_PER_GIB
    return (
        node.name,
        "+".join(node.states).lower(),
        gpus_text(gpus_by_type([node])),
        f"{node.cores - node.cores_used} of {node.cores}",
        f"{memory_free:.0f} of {node.memory_mib / _MIB_PER_GIB:.0f} GiB",
        ",".join(node.partitions),
        ",".join(node.features) or "-",
    )


def _jobs(cluster: Cluster) -> Iterator[str]:
    own = [job for job in cluster.jobs if job.user == cluster.user]
    if own:
        yield f"your jobs: {len(own)}"
        for job in own:
            when = f", starts {job.start} at the latest" if job.state == "PENDING" and job.start else ""
            gpus = "" if job.gpus is None else f", {job.gpus} GPUs"
            yield f"  {job.job_id} {job.state.lower()} in {job.partition}{gpus}{when}"
