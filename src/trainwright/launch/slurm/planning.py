"""`trainwright plan --slurm`: the cluster read, its ways to ask planned, Slurm asked about the waits that matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.inventory import Host
from trainwright.hardware.slurm.cluster import Cluster
from trainwright.hardware.slurm.cluster_text import notes
from trainwright.hardware.slurm.commands import local_cluster
from trainwright.hardware.slurm.gpu_types import told_types
from trainwright.job.loading import LoadedJob
from trainwright.launch.planning import given_keys
from trainwright.launch.slurm.waiting import ask_wait, past_waits
from trainwright.plan.job_model import require_model
from trainwright.plan.slurm.planned import Ask, PlannedRequest, gpus_asked_for, planned_requests
from trainwright.plan.slurm.ranking import STRATEGIES, SlurmPlan, rank, refused, run_s
from trainwright.plan.slurm.shapes import shapes
from trainwright.plan.slurm.wait import Wait
from trainwright.plan.wish import Wish

MOST_ASKED: Final = 20
"""Questions to Slurm for one plan: each uses up a job id and a moment of its controller's time."""
ASKED_FOR_A_STRATEGY: Final = 2
"""Requests asked about for each of the guide's strategies, those with the shortest runs."""


@dataclass(frozen=True, kw_only=True)
class AskedSlurm:
    """The flags of the command; `gpu_types` say what types of the cluster's are (`a100=a100-80gb`)."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpu_types: Sequence[str] = ()
    samples: int | None = None
    tokens_per_sample: int | None = None


def plan_on_slurm(loaded: LoadedJob, asked: AskedSlurm) -> SlurmPlan:
    """Return the requests that would run a job on this cluster, the soonest finished first.

    Raises:
        UserError: exit 4 without Slurm, GPUs or a model of which anything is known, exit 3 where nothing fits or Slurm
            takes none of the requests.
    """
    cluster = local_cluster()
    require_model(loaded.job)
    gpu_types = told_types(asked.gpu_types, cluster)
    names = [partition.name for partition in cluster.partitions]
    if asked.partition is not None and asked.partition not in names:
        raise UserError(f"no partition `{asked.partition}` here", hints=[f"there are: {', '.join(names)}"])
    wanted = shapes(cluster, gpu_types, asked.partition)
    if not wanted:
        raise UserError(
            "no partition that takes jobs has GPUs in service that can be asked for",
            problems=notes(cluster, gpu_types),
            hints=["see what there is: trainwright gpus --slurm"],
            exit_code=ExitCode.MISSING,
        )
    ask = Ask(
        wish=Wish.of(
            loaded.job,
            Host(),
            runs_here=False,
            may_leave_idle=False,
            samples=asked.samples,
            tokens_per_sample=asked.tokens_per_sample,
        ),
        account=asked.account,
        qos=asked.qos,
    )
    planned, impossible = planned_requests(loaded.job, given_keys(loaded), wanted, ask)
    asked_at = datetime.now().astimezone().isoformat(timespec="seconds")
    found = _waits(planned, cluster)
    ranked = rank(found)
    if not ranked:
        raise UserError(
            "Slurm takes none of the requests on which the job would run",
            problems=[f"{made.shape} in {made.request.partition}: {wait.refused}" for made, wait in found],
            hints=["name what your site needs: --account NAME, --qos NAME, --partition NAME"],
            exit_code=ExitCode.NO_PLAN_FITS,
        )
    known = {id(made) for made, _ in found}
    return SlurmPlan(
        cluster=cluster.name,
        version=cluster.version,
        asked_at=asked_at,
        gpus_asked=gpus_asked_for(loaded.job),
        ranked=ranked,
        refused=refused(found),
        not_asked=tuple(made for made in planned if id(made) not in known),
        impossible=tuple(impossible),
        notes=tuple(notes(cluster, gpu_types)),
    )


def _waits(planned: Sequence[PlannedRequest], cluster: Cluster) -> list[tuple[PlannedRequest, Wait]]:
    """Ask about the guide's strategies, then, the shortest run first, about all that could still finish soonest."""
    past = past_waits()
    found: dict[int, tuple[PlannedRequest, Wait]] = {}
    by_run = sorted(planned, key=run_s)

    def ask(made: PlannedRequest) -> None:
        if id(made) not in found and len(found) < MOST_ASKED:
            found[id(made)] = (made, ask_wait(made.request, cluster.name, past))

    for strategy in STRATEGIES:
        for made in [made for made in by_run if strategy.matches(made.shape)][:ASKED_FOR_A_STRATEGY]:
            ask(made)
    for made in by_run:
        soonest = min((run_s(each) + _wait_s(wait) for each, wait in found.values()), default=math.inf)
        if run_s(made) < soonest or math.isinf(soonest):
            ask(made)
    return list(found.values())


def _wait_s(wait: Wait) -> float:
    return math.inf if wait.wait_s is None else wait.wait_s
