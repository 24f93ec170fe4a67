"""What Slurm says of one job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from trainwright.hardware.reading import printable
from trainwright.hardware.slurm.commands import TIMEOUT_S, SlurmAwayError, run_slurm, slurm_output

WAITING: Final = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
HOLDING: Final = frozenset({"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"})
"""A job in one of these has its nodes."""
_SHARE: Final = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_GPUS: Final = re.compile(r"gpu:(?:(?P<type>[^:(,]+):)?(?P<count>\d+)")


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job that Slurm still knows; `shares` maps each group of nodes to the types of GPU a node of it gives."""

    job_id: str
    state: str
    reason: str
    restarts: int
    submitted: str
    start: str
    end: str
    nodes: str
    shares: tuple[tuple[str, tuple[str | None, ...]], ...]

    @property
    def waited_s(self) -> float | None:
        """How long it waited for its nodes since it was submitted, or put back into the queue."""
        try:
            began, asked = datetime.fromisoformat(self.start), datetime.fromisoformat(self.submitted)
        except ValueError:
            return None
        return max(0.0, (began - asked).total_seconds())

    @property
    def is_live(self) -> bool:
        """Whether it waits or has nodes."""
        return self.state in WAITING | HOLDING


def find_job(job_id: str, *, timeout_s: float = TIMEOUT_S) -> SlurmJob | None:
    """Return a job, None where Slurm knows it no more: some minutes after its end, without accounting.

    Raises:
        UserError: exit 4; there is no Slurm here.
        SlurmAwayError: exit 4; it does not answer within `timeout_s`.
    """
    done = run_slurm("scontrol", "-o", "-d", "show", "job", job_id, timeout_s=timeout_s)
    if done.returncode and "Invalid job id" in done.stderr:
        return None
    if done.returncode:
        raise SlurmAwayError(printable(" ".join(done.stderr.split())))
    return read_job(done.stdout)


def read_job(text: str) -> SlurmJob:
    """Read what `scontrol -o -d show job ID` prints, alike on 22.05 and 24.11."""
    text = " ".join(text.split())

    def field(key: str, otherwise: str = "") -> str:
        found = re.search(rf"(?:^| ){key}=(\S*)", text)
        return printable(found[1]) if found else otherwise

    return SlurmJob(
        job_id=field("JobId"),
        state=field("JobState", "UNKNOWN"),
        reason=field("Reason"),
        restarts=int(field("Restarts", "0")),
        submitted=field("SubmitTime"),
        start=field("StartTime"),
        end=field("EndTime"),
        nodes=field("NodeList"),
        shares=tuple((nodes, _types(gres)) for nodes, gres in _SHARE.findall(text)),
    )


def hostnames(nodes: str) -> tuple[str, ...]:
    """Return the names that a host list such as `a100-[1-2]` stands for."""
    return tuple(slurm_output("scontrol", "show", "hostnames", nodes).split())


def _types(gres: str) -> tuple[str | None, ...]:
    return tuple(match["type"] for match in _GPUS.finditer(gres) for _ in range(int(match["count"])))
