"""From the flags of `trainwright submit` to a request, with what the user leaves out taken from the cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from trainwright.errors import UserError
from trainwright.hardware.slurm.cluster import Cluster, Partition, SlurmNode
from trainwright.hardware.slurm.cluster_parser import minutes
from trainwright.hardware.slurm.commands import local_cluster
from trainwright.job.loading import LoadedJob
from trainwright.launch.slurm.planning import AskedSlurm, plan_on_slurm
from trainwright.launch.slurm.waiting import ask_wait, past_waits
from trainwright.plan.slurm.shapes import CORES_PER_GPU
from trainwright.plan.slurm.slurm_request import SlurmRequest
from trainwright.plan.slurm.wait import Wait

_GRES: Final = re.compile(r"(?:gpu:)?(?:(?P<type>[A-Za-z_][A-Za-z0-9_.-]*):)?(?P<count>[1-9][0-9]{0,3})")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says of the request; None where it says nothing."""

    gres: str | None = None
    partition: str | None = None
    nodes: int | None = None
    time: str | None = None
    memory_gib: int | None = None
    cpus: int | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None


def asked_request(loaded: LoadedJob, flags: Flags) -> tuple[SlurmRequest, str, Wait]:
    """Return the request, the cluster's name, and the wait that Slurm tells.

    Where the flags name no GPUs it is the request that has the model soonest, as `trainwright plan --slurm` ranks them.

    Raises:
        UserError: a flag cannot be read, nothing of the cluster can meet them, or there is no Slurm here.
    """
    if flags.gres is not None:
        cluster = local_cluster()
        request = request_of(flags, cluster)
        return request, cluster.name, ask_wait(request, cluster.name, past_waits())
    if flags.nodes is not None or flags.constraint is not None:
        raise UserError("--nodes and --constraint need --gres, which says what to ask of each node")
    made = plan_on_slurm(loaded, AskedSlurm(partition=flags.partition, account=flags.account, qos=flags.qos))
    best = made.ranked[0]
    given: dict[str, Any] = {
        "time_limit_min": None if flags.time is None else _time_limit(flags.time, best.planned.shape.partition),
        "memory_mib": flags.memory_gib and flags.memory_gib * 1024,
        "cpus": flags.cpus,
    }
    request = replace(best.planned.request, **{key: value for key, value in given.items() if value is not None})
    return request, made.cluster, best.wait


def request_of(flags: Flags, cluster: Cluster) -> SlurmRequest:
    """Return the request for named GPUs; what is left out is the share of the nodes' that goes with them.

    Raises:
        UserError: a flag cannot be read, or no node of the partition has what is asked for.
    """
    assert flags.gres is not None
    number = flags.nodes or 1
    match = _GRES.fullmatch(flags.gres)
    if match is None:
        raise UserError(
            f"--gres {flags.gres} is not understood", hints=["--gres gpu:a100:2", "--gres gpu:4 for any type"]
        )
    count, kind = int(match["count"]), match["type"]
    partition = _partition(flags.partition, cluster)
    nodes = [node for node in cluster.nodes_of(partition.name) if _count(node, kind) >= count]
    if len(nodes) < number:
        types = sorted({gpus.type or "gpu" for node in cluster.nodes_of(partition.name) for gpus in node.gpus})
        raise UserError(
            f"{len(nodes)} nodes of the partition {partition.name} have {flags.gres}, and {number} are asked for",
            hints=[
                f"the types there are {', '.join(types)}; counts are for each node",
                "see: trainwright gpus --slurm",
            ],
        )
    return SlurmRequest(
        partition=partition.name,
        nodes=number,
        gpus_per_node=count,
        gpu_type=kind,
        time_limit_min=_time_limit(flags.time, partition),
        memory_mib=_share(flags.memory_gib and flags.memory_gib * 1024, [n.memory_mib for n in nodes], nodes, count),
        cpus=flags.cpus or min(CORES_PER_GPU * count, _share(None, [node.cores for node in nodes], nodes, count)),
        constraint=flags.constraint,
        account=flags.account,
        qos=flags.qos,
    )


def _partition(name: str | None, cluster: Cluster) -> Partition:
    for partition in cluster.partitions:
        if partition.name == name or (name is None and partition.is_default):
            return partition
    names = ", ".join(partition.name for partition in cluster.partitions)
    missing = f"there is no partition {name}" if name else "the cluster has no default partition"
    raise UserError(missing, hints=[f"--partition with one of {names}"])


def _count(node: SlurmNode, kind: str | None) -> int:
    return sum(gpus.count for gpus in node.gpus if kind in (None, gpus.type))


def _share(asked: int | None, of_nodes: Sequence[int], nodes: Sequence[SlurmNode], count: int) -> int:
    """What is asked for, else of the node that has least, the share that goes with `count` of its GPUs."""
    return asked or min(max(1, total * count // node.gpu_count) for total, node in zip(of_nodes, nodes, strict=True))


def _time_limit(text: str | None, partition: Partition) -> int:
    if text is None:
        limit = partition.max_time_min or partition.default_time_min
        if limit is None:
            raise UserError("how long may the job take?", hints=["--time 24:00:00"])
        return limit
    limit = minutes(text)
    if not limit:
        raise UserError(
            f"--time {text} is not understood", hints=["--time 90 (minutes)", "--time 24:00:00", "--time 2-00:00:00"]
        )
    if partition.max_time_min is not None and limit > partition.max_time_min:
        raise UserError(
            f"--time {text} is above the limit of the partition {partition.name}, {partition.max_time_min} min",
            hints=[
                "ask for less: the run goes on in the job's next life",
                "or submit several, one after the other: --chain 3",
            ],
        )
    return limit
