"""`trainwright plan`: a job against GPUs that are here, somewhere else, or only written down."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainwright.errors import UserError
from trainwright.estimate.calibration import Calibration
from trainwright.estimate.measured_runs import stored_runs
from trainwright.estimate.traced import traced_memory
from trainwright.hardware.inventory import Inventory
from trainwright.hardware.inventory_source import asked_inventory, stored_inventory
from trainwright.hardware.selection import select_devices
from trainwright.job.loading import LoadedJob
from trainwright.job.schema import Job
from trainwright.out_of_memory import expanding_by
from trainwright.plan.choose import Plan, Wish, choose
from trainwright.plan.confirmed import Tracing
from trainwright.plan.estimates import Amount
from trainwright.plan.search import GOALS
from trainwright.plan.tuned import stored_answers


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """The flags of the command."""

    gpus: str | None = None
    inventory: Path | None = None
    goal: str = "soonest"
    samples: int | None = None
    tokens_per_sample: int | None = None
    trace: bool = False


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
    there = _inventory(job, asked)
    gpus = job.resources.gpus
    devices = select_devices(there, gpus) if isinstance(gpus, list) and asked.gpus is None else there.usable
    amount = Amount(asked.samples or samples_in(job), asked.tokens_per_sample)
    given = {key for key, origin in loaded.origins.items() if origin.kind != "default"}
    wish = Wish(
        goal=asked.goal,  # type: ignore[arg-type]
        amount=amount,
        host=there.host,
        calibration=Calibration(stored_runs()),
        tuned=stored_answers(),
        expanding_by=expanding_by(),
        may_leave_idle=True,
        must_fit=True,
        tracing=Tracing(traced_memory) if asked.trace else None,
    )
    job, plan = choose(job, given, devices, wish)
    return job, plan, amount


def samples_in(job: Job) -> int | None:
    """Return the number of examples in the job's data file, None where counting needs more than reading lines."""
    if job.data.path is None:
        return None
    path = Path(job.data.path)
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open("rb") as file:
        rows = sum(1 for line in file if line.strip())
    if job.data.limit is not None:
        rows = min(rows, job.data.limit)
    return rows if job.data.eval_path is not None else rows - round(rows * job.data.eval_split)


def _inventory(job: Job, asked: PlanFlags) -> Inventory:
    if asked.inventory is not None:
        return stored_inventory(asked.inventory)
    return asked_inventory(asked.gpus, job.resources.device)
