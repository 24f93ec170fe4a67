"""`trainwright plan`: a job against GPUs that are here, somewhere else, or only written down."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trainwright.errors import UserError
from trainwright.estimate.figures import Memory
from trainwright.estimate.recorded_traces import RecordedTraces, kept_traces, path_of, read_traces
from trainwright.estimate.request import Request
from trainwright.estimate.traced import is_recorded, torch_is_there, traced_memory
from trainwright.hardware.catalog import GpuSpec
from trainwright.hardware.inventory import Device, Inventory
from trainwright.hardware.inventory_source import asked_inventory, stored_inventory
from trainwright.hardware.reading import GIB
from trainwright.hardware.selection import select_devices
from trainwright.job.loading import LoadedJob
from trainwright.job.schema import Job
from trainwright.launch.run_output import tell
from trainwright.plan.choose import Plan, choose
from trainwright.plan.confirmed import Tracing
from trainwright.plan.estimates import Amount
from trainwright.plan.search import GOALS
from trainwright.plan.wish import Wish


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """The flags of the command."""

    gpus: str | None = None
    inventory: Path | None = None
    goal: str = "soonest"
    samples: int | None = None
    tokens_per_sample: int | None = None
    trace: bool | None = None
    """True: also what has a closed form; False: nothing; None: what has none, where torch or a recording is there."""
    recording: Path | None = None


def plan_job(loaded: LoadedJob, asked: PlanFlags) -> tuple[Job, Plan, Amount]:
    """Return the job with its global batch settled, the plan, and how much data it was made for.

    Raises:
        UserError: the flags contradict each other, the job cannot run, or (exit code 3) nothing fits.
    """
    if asked.goal not in GOALS:
        raise UserError(f"--goal {asked.goal} is unknown", hints=[f"choose one of {', '.join(GOALS)}"])
    if asked.gpus is not None and asked.inventory is not None:
        raise UserError("`--gpus` and `--inventory` both name GPUs", hints=["leave one of them out"])
    job = loaded.job
    runs_here = asked.inventory is None and asked.gpus in (None, "auto")
    if runs_here:
        inventory, devices, may_leave_idle = devices_here(job, asked.gpus)
    else:
        inventory, may_leave_idle = _inventory(job, asked), True
        gpus = job.resources.gpus
        by_name = isinstance(gpus, list) and asked.gpus is None
        devices = select_devices(inventory, gpus) if by_name else inventory.usable
    wish = Wish.of(
        job,
        inventory.host,
        runs_here=runs_here,
        may_leave_idle=may_leave_idle,
        goal=asked.goal,  # type: ignore[arg-type]
        samples=asked.samples,
        tokens_per_sample=asked.tokens_per_sample,
        must_fit=True,
        tracing=tracing_of(asked.trace, asked.recording),
    )
    job, plan = choose(job, given_keys(loaded), devices, wish)
    return job, plan, wish.amount


def tracing_of(trace: bool | None, recording: Path | None) -> Tracing | None:
    """Return how steps are traced: said aloud, as it takes seconds.

    Raises:
        UserError: the recording cannot be read, or contradicts that nothing is traced.
    """
    if trace is False and recording is not None:
        raise UserError("--recording is of traces, and --no-trace takes none", hints=["leave one of them out"])
    given = None if recording is None else read_traces(recording)
    if trace is False or (trace is None and given is None and not torch_is_there()):
        return None
    return Tracing(partial(traced_aloud, given=given), 0.0 if trace else math.inf, given)


def traced_aloud(request: Request, gpu: GpuSpec | None, given: RecordedTraces | None = None) -> Memory:
    """Trace a step, and say so: it takes seconds in which nothing else is heard."""
    if is_recorded(request, given):
        return traced_memory(request, gpu, given)
    step = f"{request.strategy}, micro-batch {request.micro_batch_size}"
    tell(
        f"Tracing a step of this {request.config.get('model_type')} model ({step}): some seconds, the next plan has it"
    )
    began_s = time.monotonic()
    memory = traced_memory(request, gpu, given)
    kept = path_of(kept_traces(request.config, request.auto_class))
    took = f"{memory.device_bytes / GIB:.1f} GiB, traced in {time.monotonic() - began_s:.0f} s"
    tell(f"  {took}; kept in {kept}, which --recording takes where torch is not")
    return memory


def given_keys(loaded: LoadedJob) -> set[str]:
    """Return the keys that the user wrote, dotted."""
    return {key for key, origin in loaded.origins.items() if origin.kind != "default"}


def devices_here(job: Job, gpus: str | None) -> tuple[Inventory, tuple[Device, ...], bool]:
    """Return this machine's inventory, the devices that the job gets, and whether it may leave some of them idle.

    `gpus` comes before what the job says. GPUs that were named or counted are all used.
    """
    inventory = asked_inventory(None, job.resources.device)
    devices = select_devices(inventory, gpus if gpus is not None else job.resources.gpus)
    return inventory, devices, gpus is None and job.resources.gpus == "auto" and job.resources.ranks == "auto"


def _inventory(job: Job, asked: PlanFlags) -> Inventory:
    if asked.inventory is not None:
        return stored_inventory(asked.inventory)
    return asked_inventory(asked.gpus, job.resources.device)
