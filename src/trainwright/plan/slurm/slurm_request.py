"""A request to Slurm: the resources that a run asks for, as data and as the literal options of sbatch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from trainwright.errors import UserError

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+-]*")
"""Partitions, GPU types, accounts and QOS: nothing that a shell, a comma list or `#SBATCH` reads otherwise."""
_CONSTRAINT: Final = re.compile(r"[A-Za-z0-9_\[(][A-Za-z0-9_.:+*&|\[\]()-]*")


@dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """What one job asks for; memory and cores are those of each node.

    `gpu_type` is the type as the cluster spells it, None for GPUs of any type.

    Raises:
        UserError: a name holds what no name of Slurm's holds.
    """

    partition: str
    nodes: int
    gpus_per_node: int
    gpu_type: str | None
    time_limit_min: int
    memory_mib: int
    cpus: int
    constraint: str | None = None
    account: str | None = None
    qos: str | None = None

    def __post_init__(self) -> None:
        assert min(self.nodes, self.gpus_per_node, self.time_limit_min, self.memory_mib, self.cpus) > 0
        names = {"partition": self.partition, "type": self.gpu_type, "account": self.account, "qos": self.qos}
        problems = [f"{what}: {name!r}" for what, name in names.items() if name and not _NAME.fullmatch(name)]
        if self.constraint and not _CONSTRAINT.fullmatch(self.constraint):
            problems.append(f"constraint: {self.constraint!r}")
        if problems:
            raise UserError("Slurm has no such names", problems=problems)

    @property
    def gpus(self) -> int:
        """GPUs of the whole job."""
        return self.nodes * self.gpus_per_node

    @property
    def gres(self) -> str:
        """The GPUs of one node as `--gres` takes them."""
        return f"gpu:{self.gpu_type}:{self.gpus_per_node}" if self.gpu_type else f"gpu:{self.gpus_per_node}"

    def options(self) -> tuple[str, ...]:
        """Return the options of sbatch, one argument each; a script's `#SBATCH` lines are the same.

        One task a node: the launcher, which starts a rank for each GPU.
        """
        always = (
            f"--partition={self.partition}",
            f"--nodes={self.nodes}",
            "--ntasks-per-node=1",
            f"--gres={self.gres}",
            f"--cpus-per-task={self.cpus}",
            f"--mem={self.memory_mib}M",
            f"--time={slurm_time(self.time_limit_min)}",
        )
        named = {"constraint": self.constraint, "account": self.account, "qos": self.qos}
        return always + tuple(f"--{option}={value}" for option, value in named.items() if value)

    def to_json(self) -> dict[str, Any]:
        """Return the request as plain data."""
        return {
            "partition": self.partition,
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "gpu_type": self.gpu_type,
            "time_limit_min": self.time_limit_min,
            "memory_mib": self.memory_mib,
            "cpus": self.cpus,
            "constraint": self.constraint,
            "account": self.account,
            "qos": self.qos,
            "options": list(self.options()),
        }


def slurm_time(minutes: int) -> str:
    """Return a time limit as Slurm writes it: `1-02:30:00`."""
    days, rest = divmod(minutes, 24 * 60)
    hours, minutes = divmod(rest, 60)
    return f"{days}-{hours:02}:{minutes:02}:00" if days else f"{hours:02}:{minutes:02}:00"
