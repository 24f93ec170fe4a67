"""Which GPUs a cluster can be asked for, and what each way of asking may bring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from trainwright.hardware.slurm.cluster import Cluster, Partition, SlurmNode
from trainwright.hardware.slurm.gpu_types import model_of

MOST_NODES: Final = 8
"""More nodes are not proposed: nobody waits for the last of them by chance."""
CORES_PER_GPU: Final = 8
"""Cores that a rank can use beside its GPU, where the node's share for a GPU is as large."""

NodeKeys = tuple[str | None, ...]
"""The models of the GPUs that a job gets on one node, as keys of the catalogue; None for one that is not known."""


@dataclass(frozen=True, kw_only=True)
class GpuShape:
    """A way to ask for GPUs: `gpus_per_node` of a type (None: of any) on each of `nodes`.

    `may_get` are all the sets of GPUs that the scheduler may give for it, one node's after the other. `memory_mib` is
    the most that so many nodes have, `cores` the GPUs' share on any of them.
    """

    partition: Partition
    nodes: int
    gpus_per_node: int
    gpu_type: str | None
    constraint: str | None
    may_get: tuple[tuple[NodeKeys, ...], ...]
    memory_mib: int
    cores: int

    @property
    def gpus(self) -> int:
        """GPUs of the whole job."""
        return self.nodes * self.gpus_per_node

    @property
    def is_flexible(self) -> bool:
        """Whether the scheduler chooses the type."""
        return self.gpu_type is None and self.constraint is None

    def __str__(self) -> str:
        kind = f":{self.gpu_type}" if self.gpu_type else ""
        on = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        features = f" with the feature {self.constraint}" if self.constraint else ""
        return f"gpu{kind}:{self.gpus_per_node}{on}{features}"


def shapes(cluster: Cluster, gpu_types: Mapping[str, str], partition: str | None = None) -> list[GpuShape]:
    """Return the ways worth comparing, of all partitions that take jobs, or of one."""
    found: list[GpuShape] = []
    for queue in cluster.partitions:
        if queue.is_up and partition in (None, queue.name):
            nodes = cluster.nodes_of(queue.name)
            found += [*_typed(queue, nodes, gpu_types), *_any_type(queue, nodes, gpu_types)]
    return found


def _typed(queue: Partition, nodes: Sequence[SlurmNode], gpu_types: Mapping[str, str]) -> Iterator[GpuShape]:
    models = _having(nodes, gpu_types)
    for kind in dict.fromkeys(kind for kind, _ in models):
        of_kind = {key: having for (other, key), having in models.items() if other == kind}
        of_that_type = [node for node, _ in chain.from_iterable(of_kind.values())]
        rivals, is_only = (nodes, len(models) == 1) if kind is None else (of_that_type, len(of_kind) == 1)
        all_clear = True
        for key, having in of_kind.items():
            constraint = None if is_only else _telling_feature([node for node, _ in having], rivals)
            if key is not None and (is_only or constraint is not None):
                yield from _of_models(queue, kind, constraint, {key: having})
            else:
                all_clear = False
        if kind is not None and not all_clear:
            # Nothing tells these models apart: any of the type may come.
            yield from _of_models(queue, kind, None, of_kind)


def _of_models(
    queue: Partition, kind: str | None, constraint: str | None, models: Mapping[str | None, list[tuple[SlurmNode, int]]]
) -> Iterator[GpuShape]:
    """One node with each number of GPUs, and several with as many as each of them has."""
    having = [entry for entries in models.values() for entry in entries]
    gpu_counts = sorted((gpus for _, gpus in having), reverse=True)
    for count in _counts(gpu_counts[0]):
        keys = [key for key, entries in models.items() if _with_gpus(entries, count)]
        of_one_key = tuple(((key,) * count,) for key in keys)
        yield _shape(queue, _with_gpus(having, count), 1, count, kind, constraint, of_one_key)
    if len(models) > 1:
        return
    (key,) = models
    for number in _node_counts(queue, len(having)):
        count = gpu_counts[number - 1]
        alike = ((key,) * count,) * number
        yield _shape(queue, _with_gpus(having, count), number, count, kind, constraint, (alike,))


def _with_gpus(having: Sequence[tuple[SlurmNode, int]], count: int) -> list[SlurmNode]:
    return [node for node, gpus in having if gpus >= count]


def _any_type(queue: Partition, nodes: Sequence[SlurmNode], gpu_types: Mapping[str, str]) -> Iterator[GpuShape]:
    """One node with GPUs of whatever type; nothing new where the partition has only one."""
    if len(_having(nodes, gpu_types)) < 2:
        return
    for count in _counts(max(node.gpu_count for node in nodes)):
        on = [node for node in nodes if node.gpu_count >= count]
        may_get = dict.fromkeys((keys,) for node in on for keys in _choices(_keys(node, gpu_types), count))
        yield _shape(queue, on, 1, count, None, None, tuple(may_get))


def _shape(
    queue: Partition,
    nodes: Sequence[SlurmNode],
    number: int,
    count: int,
    kind: str | None,
    constraint: str | None,
    may_get: tuple[tuple[NodeKeys, ...], ...],
) -> GpuShape:
    memory = sorted((node.memory_mib for node in nodes), reverse=True)[number - 1]
    cores = min(max(1, node.cores * count // node.gpu_count) for node in nodes)
    return GpuShape(
        partition=queue,
        nodes=number,
        gpus_per_node=count,
        gpu_type=kind,
        constraint=constraint,
        may_get=may_get,
        memory_mib=min(memory, queue.max_memory_per_node_mib or memory),
        cores=min(cores, CORES_PER_GPU * count, queue.max_cores_per_node or cores),
    )


def _having(
    nodes: Sequence[SlurmNode], gpu_types: Mapping[str, str]
) -> dict[tuple[str | None, str | None], list[tuple[SlurmNode, int]]]:
    """Return the nodes that have each type and model, with how many."""
    found: dict[tuple[str | None, str | None], list[tuple[SlurmNode, int]]] = {}
    for node in nodes:
        for gpus in node.gpus:
            key = model_of(gpus.type, node.features, gpu_types).key
            found.setdefault((gpus.type, key), []).append((node, gpus.count))
    return found


def _telling_feature(having: Sequence[SlurmNode], nodes: Sequence[SlurmNode]) -> str | None:
    """Return a feature that all these nodes have and no others."""
    others = {feature for node in nodes if node not in having for feature in node.features}
    common = [feature for feature in having[0].features if all(feature in node.features for node in having)]
    return next((feature for feature in common if feature not in others), None)


def _keys(node: SlurmNode, gpu_types: Mapping[str, str]) -> list[tuple[str | None, int]]:
    return [(model_of(gpus.type, node.features, gpu_types).key, gpus.count) for gpus in node.gpus]


def _choices(gpus: Sequence[tuple[str | None, int]], count: int) -> Iterator[NodeKeys]:
    """Yield every choice of `count` GPUs out of those of a node, of which there are so many of each model."""
    if not gpus:
        if count == 0:
            yield ()
        return
    (key, most), rest = gpus[0], gpus[1:]
    for of_key in range(min(most, count), -1, -1):
        for others in _choices(rest, count - of_key):
            yield (key,) * of_key + others


def _counts(most: int) -> list[int]:
    return [count for count in range(1, most + 1) if count <= 4 or count % 2 == 0 or count == most]


def _node_counts(queue: Partition, nodes: int) -> list[int]:
    most = min(nodes, queue.max_nodes or nodes, MOST_NODES)
    return [number for number in range(2, most + 1) if number <= 4 or number % 2 == 0]
