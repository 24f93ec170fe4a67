"""How long a request waits: what Slurm says, and what came of it when it said so before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Final

from trainwright.plan.slurm.slurm_request import SlurmRequest

LEAST_PAST_WAITS: Final = 3
"""Fewer correct nothing."""
_SCHEDULER_S: Final = 60
"""The scheduler looks at limits every half minute: waits and estimates this near each other are the same."""


@dataclass(frozen=True, kw_only=True)
class PastWait:
    """A job of this user that started: how long Slurm said that it would wait, and how long it did."""

    job_id: str
    cluster: str
    partition: str
    gpu_type: str | None
    gpus: int
    told_s: float
    waited_s: float


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The wait that is expected, None where nothing tells, and why; `nodes` is where Slurm would start the job now.

    `told_s` is Slurm's own figure. `refused` is why it would not take the request, in its words.
    """

    wait_s: float | None
    reason: str
    told_s: float | None = None
    nodes: str | None = None
    refused: str | None = None


def expected_wait(
    request: SlurmRequest, cluster: str, told_s: float | None, nodes: str | None, past: Iterable[PastWait]
) -> Wait:
    """Return the wait that Slurm told, corrected by what came of it before for the same type and number of GPUs.

    Slurm plans as if every job ran to its time limit, so what it tells is rather too late (measured: right to about
    30 s a generation of jobs that use their limits, else up to several times too long).
    """
    alike = [
        wait
        for wait in past
        if (wait.cluster, wait.partition, wait.gpu_type, wait.gpus)
        == (cluster, request.partition, request.gpu_type, request.gpus)
    ]
    if len(alike) < LEAST_PAST_WAITS:
        if told_s is None:
            return Wait(wait_s=None, reason="Slurm tells no start time", nodes=nodes)
        return Wait(wait_s=told_s, reason="Slurm's word, at the latest about", told_s=told_s, nodes=nodes)
    seen = f"{len(alike)} such jobs of yours waited {_minutes(median(wait.waited_s for wait in alike))} (median)"
    if told_s is None:
        waited = median(wait.waited_s for wait in alike)
        return Wait(wait_s=waited, reason=f"Slurm tells no start time; {seen}", nodes=nodes)
    ratio = median((wait.waited_s + _SCHEDULER_S) / (wait.told_s + _SCHEDULER_S) for wait in alike)
    corrected = max(0.0, (told_s + _SCHEDULER_S) * ratio - _SCHEDULER_S)
    return Wait(
        wait_s=corrected,
        reason=f"Slurm says {_minutes(told_s)}, corrected by x {ratio:.2f}: {seen}",
        told_s=told_s,
        nodes=nodes,
    )


def _minutes(wait_s: float) -> str:
    return f"{wait_s / 60:.0f} min"
