"""What a job got, as seen from inside it: no variable of Slurm's names the types of its GPUs."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.inventory import Device, Inventory, written_devices
from trainwright.hardware.local import local_inventory
from trainwright.hardware.slurm.commands import slurm_output
from trainwright.hardware.slurm.gpu_types import model_of
from trainwright.launch.node import address_towards
from trainwright.launch.slurm.jobs import SlurmJob, find_job, hostnames

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The job's nodes, this one first, with the types of the GPUs that each gives."""

    job: SlurmJob
    nodes: tuple[str, ...]
    types: tuple[tuple[str | None, ...], ...]

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(len(types) for types in self.types)


def read_allocation(job_id: str) -> Allocation:
    """Return what the job got; on a single node also where Slurm cannot be asked from there.

    Raises:
        UserError: exit 4; Slurm cannot be asked from here.
    """
    try:
        job = find_job(job_id)
    except UserError:
        if os.environ.get("SLURM_JOB_NUM_NODES") != "1":
            raise
        return _from_environment(job_id)
    if job is None:
        raise UserError(f"Slurm knows no job {job_id}", exit_code=ExitCode.MISSING)
    of_node = {node: types for nodes, types in job.shares for node in hostnames(nodes)}
    nodes = hostnames(job.nodes)
    return Allocation(job=job, nodes=nodes, types=tuple(of_node.get(node, ()) for node in nodes))


def _from_environment(job_id: str) -> Allocation:
    variables = os.environ
    job = SlurmJob(
        job_id=job_id,
        state="RUNNING",
        reason="",
        restarts=int(variables.get("SLURM_RESTART_COUNT", "0")),
        submitted="",
        start=datetime.datetime.now().isoformat(timespec="seconds"),
        end="",
        nodes=variables["SLURMD_NODENAME"],
        shares=(),
    )
    count = int(variables.get("SLURM_GPUS_ON_NODE", "0"))
    return Allocation(job=job, nodes=(job.nodes,), types=((None,) * count,))


def gpus_of(allocation: Allocation) -> tuple[Device, ...]:
    """Return the GPUs of all nodes: those of this one as its driver shows them, else by the names of their types.

    A node with the types of this one is taken to be like it.
    """
    here = tuple(device for device in local_inventory("auto").usable if device.kind == "cuda")
    found: list[Device] = []
    for number, types in enumerate(allocation.types):
        alike = bool(here) and sorted(map(str, types)) == sorted(map(str, allocation.types[0]))
        devices = here if alike else _by_type(types)
        found += [replace(device, node=number) for device in devices]
    return tuple(found)


def inventory_of(allocation: Allocation, kind: str) -> Inventory:
    """Return what the job can train on: its GPUs, or the processors of its nodes where it asks for these.

    Raises:
        UserError: exit 4; there is none of the kind that the job asks for.
    """
    gpus = gpus_of(allocation) if kind != "cpu" else ()
    if kind == "cuda" and not gpus:
        raise UserError("the job got no GPU that its driver or Slurm names", exit_code=ExitCode.MISSING)
    local = local_inventory("cpu")
    return replace(local, devices=gpus or local.devices, nodes=len(allocation.nodes))


def meeting_address(allocation: Allocation) -> str:
    """Return an address of this node by which the job's other nodes reach it.

    It is the one that this node reaches them from, at the addresses that Slurm itself uses: their names need not
    resolve, and this node's own name often stands for loopback.
    """
    if len(allocation.nodes) == 1:
        return LOOPBACK
    other = allocation.nodes[1]
    shown = slurm_output("scontrol", "-o", "show", "node", other).split()
    addresses = [word.removeprefix("NodeAddr=") for word in shown if word.startswith("NodeAddr=")]
    return address_towards(addresses[0] if addresses else other)


def _by_type(types: Sequence[str | None]) -> tuple[Device, ...]:
    keys = [model_of(kind, (), {}).key for kind in types]
    unknown = sorted({str(kind) for kind, key in zip(types, keys, strict=True) if key is None})
    if unknown:
        raise UserError(
            f"no driver shows the GPUs of a node, and the catalogue does not know {', '.join(unknown)}",
            hints=["ask for a type that `trainwright gpus --slurm` knows"],
            exit_code=ExitCode.MISSING,
        )
    return written_devices([[key for key in keys if key is not None]])
