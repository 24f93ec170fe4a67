"""A request with the plan for the GPUs that it brings: what to ask for, and how long the run then takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from trainwright.errors import ExitCode, UserError
from trainwright.estimate.time import RunTime
from trainwright.hardware.choice import Choice
from trainwright.hardware.inventory import Host, written_devices
from trainwright.hardware.reading import GIB, MIB
from trainwright.job.schema import Job
from trainwright.plan.choose import Plan, choose
from trainwright.plan.explain import seconds
from trainwright.plan.reasons import devices_text
from trainwright.plan.slurm.shapes import GpuShape, NodeKeys
from trainwright.plan.slurm.slurm_request import SlurmRequest
from trainwright.plan.wish import Wish

SPARE_MEMORY: Final = 1.25
"""Times the estimate of host memory: Slurm ends a job that needs more than it asked for."""
ROUND_MIN: Final = 5
"""Time limits are whole multiples of this."""
GRACE_MIN: Final = 10
"""Added to the longest run that is expected: a last checkpoint, a slow file system at the start."""
LIMIT_WITHOUT_ESTIMATE_MIN: Final = 24 * 60
MEMORY_WITHOUT_ESTIMATE_GIB_PER_GPU: Final = 32
"""FramerTurbo's scripts ask for 64, 96 and 128 GB with 2, 3 and 4 GPUs (S0-34)."""


@dataclass(frozen=True, kw_only=True)
class PlannedRequest:
    """A request, and the slowest of the plans for what it may bring.

    `fastest` is the run with the best that it may bring, `run` with the worst; both are None where speed or amount of
    data are not known. `jobs` is how many jobs of this length, one after the other, the run may need.
    """

    shape: GpuShape
    request: SlurmRequest
    job: Job
    plan: Plan
    run: RunTime | None
    fastest: RunTime | None
    gpus: str
    jobs: int
    choices: dict[str, Choice[int]]


@dataclass(frozen=True, kw_only=True)
class Impossible:
    """A way to ask for GPUs on which the job does not run, with why."""

    shape: GpuShape
    why: str


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a request has besides the GPUs, and what is wished of each plan, whatever the host."""

    wish: Wish
    account: str | None = None
    qos: str | None = None


def planned_requests(
    job: Job, given: Collection[str], wanted: Iterable[GpuShape], ask: Ask
) -> tuple[list[PlannedRequest], list[Impossible]]:
    """Return a planned request for every shape that the job can run on, and the others with the reason.

    Raises:
        UserError: exit 3; the job runs on none of them.
    """
    count = gpus_asked_for(job)
    planner = _Planner(job, given, ask)
    found: list[PlannedRequest] = []
    impossible: list[Impossible] = []
    for shape in wanted:
        if count is not None and shape.gpus != count:
            continue
        try:
            found.append(planner.planned(shape))
        except _DoesNotRunError as error:
            impossible.append(Impossible(shape=shape, why=str(error)))
    if not found:
        asked = "" if count is None else f" with {count} GPUs"
        raise UserError(
            f"the job runs on none of the cluster's GPUs{asked} (all figures are estimates)",
            problems=[f"{each.shape} in {each.shape.partition.name}: {each.why}" for each in impossible],
            hints=[
                "see what there is: trainwright gpus --slurm",
                "see what would fit: trainwright plan JOB --gpus SPEC",
            ],
            exit_code=ExitCode.NO_PLAN_FITS,
        )
    return found, impossible


def gpus_asked_for(job: Job) -> int | None:
    """Return the number of GPUs that the job itself names, None where it leaves that open.

    Raises:
        UserError: it names GPUs of one machine.
    """
    gpus, ranks = job.resources.gpus, job.resources.ranks
    if isinstance(gpus, list):
        raise UserError(
            "resources.gpus names GPUs of one machine, and Slurm chooses which ones a job gets",
            hints=[f"resources.gpus={len(gpus)}", "or resources.gpus=auto"],
        )
    return gpus if isinstance(gpus, int) else ranks if isinstance(ranks, int) else None


class _DoesNotRunError(Exception):
    """The job does not run on what a shape may bring."""


class _Planner:
    """Plans a job for sets of GPUs, each set once."""

    def __init__(self, job: Job, given: Collection[str], ask: Ask) -> None:
        self._job = job
        self._given = given
        self._ask = ask
        self._known: dict[tuple[tuple[NodeKeys, ...], int], tuple[Job, Plan]] = {}

    def planned(self, shape: GpuShape) -> PlannedRequest:
        """Plan for all that the shape may bring; raises _DoesNotRunError where the job does not run on one of it."""
        plans = [self._plan(nodes, shape.memory_mib) for nodes in shape.may_get]
        job, slowest = max(plans, key=lambda made: _slowness(made[1]))
        runs = [plan.estimate.run for _, plan in plans if plan.estimate is not None and plan.estimate.run is not None]
        run = slowest.estimate.run if slowest.estimate is not None else None
        limit, jobs = _time_limit(run, shape)
        memory = _memory(plans, shape)
        cores = Choice(shape.cores, "the GPUs' share of the node's cores, 8 a GPU at most")
        request = SlurmRequest(
            partition=shape.partition.name,
            nodes=shape.nodes,
            gpus_per_node=shape.gpus_per_node,
            gpu_type=shape.gpu_type,
            time_limit_min=limit.value,
            memory_mib=memory.value,
            cpus=cores.value,
            constraint=shape.constraint,
            account=self._ask.account,
            qos=self._ask.qos,
        )
        return PlannedRequest(
            shape=shape,
            request=request,
            job=job,
            plan=slowest,
            run=run if len(runs) == len(plans) else None,
            fastest=min(runs, key=lambda each: each.run_s) if len(runs) == len(plans) else None,
            gpus=" or ".join(dict.fromkeys(devices_text(plan.devices) for _, plan in plans)),
            jobs=jobs,
            choices={"time": limit, "mem": memory, "cpus-per-task": cores},
        )

    def _plan(self, nodes: tuple[NodeKeys, ...], memory_mib: int) -> tuple[Job, Plan]:
        known = [tuple(key for key in keys if key is not None) for keys in nodes]
        if [len(keys) for keys in known] != [len(keys) for keys in nodes]:
            raise _DoesNotRunError("it may bring GPUs that the catalogue does not know")
        if (nodes, memory_mib) not in self._known:
            wish = dataclasses.replace(self._ask.wish, host=Host(memory_total_bytes=memory_mib * MIB))
            try:
                self._known[nodes, memory_mib] = choose(self._job, self._given, written_devices(known), wish)
            except UserError as error:
                raise _DoesNotRunError("; ".join((error.message, *error.problems))) from error
        job, plan = self._known[nodes, memory_mib]
        if plan.ranked and plan.ranked[0].why_not is not None:
            raise _DoesNotRunError(f"on {devices_text(plan.devices)}: {plan.ranked[0].why_not}")
        if plan.least is not None and plan.least.why_not is not None:
            raise _DoesNotRunError(f"on {devices_text(plan.devices)}: {plan.least.why_not}")
        return job, plan


def _slowness(plan: Plan) -> tuple[float, float]:
    """Seconds of the run and of a step; one that is not known is the slowest."""
    estimate = plan.estimate
    run = None if estimate is None else estimate.run
    time = None if estimate is None else estimate.time
    return (math.inf if run is None else run.run_s, math.inf if time is None else time.step_s)


def _time_limit(run: RunTime | None, shape: GpuShape) -> tuple[Choice[int], int]:
    """Return the time limit, and how many jobs of that length the run may need."""
    most = shape.partition.max_time_min
    if run is None:
        if most is not None:
            return Choice(most, "the partition's limit, as the run's length is not known"), 1
        return Choice(LIMIT_WITHOUT_ESTIMATE_MIN, "a day, as the run's length is not known"), 1
    needed = math.ceil((run.high_s / 60 + GRACE_MIN) / ROUND_MIN) * ROUND_MIN
    longest = f"the longest run that is expected, {seconds(run.high_s)}, and {GRACE_MIN} min"
    if most is None or needed <= most:
        return Choice(needed, longest), 1
    jobs = math.ceil(run.high_s / 60 / max(1, most - GRACE_MIN))
    return Choice(most, f"the partition's limit; {longest}, need {jobs} jobs: submit with --chain {jobs}"), jobs


def _memory(plans: Iterable[tuple[Job, Plan]], shape: GpuShape) -> Choice[int]:
    """Return the memory of each node: for the most that any of the plans needs."""
    needs = [
        0 if plan.estimate is None or plan.estimate.host is None else plan.estimate.host.node_bytes for _, plan in plans
    ]
    if not all(needs):
        asked = MEMORY_WITHOUT_ESTIMATE_GIB_PER_GPU * shape.gpus_per_node * 1024
        why = f"{MEMORY_WITHOUT_ESTIMATE_GIB_PER_GPU} GiB a GPU, as the need is not known"
    else:
        gib = math.ceil(max(needs) * SPARE_MEMORY / GIB)
        asked, why = gib * 1024, f"{SPARE_MEMORY} x the estimate of {max(needs) / GIB:.1f} GiB"
    if asked > shape.memory_mib:
        return Choice(shape.memory_mib, f"all that a node gives, less than {why}")
    return Choice(asked, why)
