"""`trainwright train`: one command that starts a run, resumes it, or says that it is finished."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

from trainwright.errors import ExitCode, UserError, not_installed
from trainwright.estimate.calibration import Calibration
from trainwright.estimate.measured_runs import record_run, stored_runs
from trainwright.hardware.inventory import Host
from trainwright.hardware.local import local_inventory, select_devices
from trainwright.hardware.reading import GIB, NotAvailable
from trainwright.job.loading import LoadedJob
from trainwright.job.schema import Job
from trainwright.launch.beginning import make_ready, write_run_files
from trainwright.launch.planning import samples_in
from trainwright.launch.showing import tell
from trainwright.launch.supervision import StopAsked, run_attempts
from trainwright.plan.choose import Plan, Wish, choose
from trainwright.plan.estimates import Amount
from trainwright.plan.layout import Layout
from trainwright.plan.requirements import require_runnable
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import RunLock
from trainwright.runs.writing import read_json

DEFAULT_MAX_RESTARTS = 3


@dataclass(frozen=True)
class TrainOptions:
    """The flags of the command: how to run, never what to learn.

    `resume` is None, `latest` or a checkpoint folder; `allow` are the keys whose change a resume may take.
    """

    gpus: str | None = None
    resume: str | None = None
    fresh: bool = False
    dry_run: bool = False
    allow: tuple[str, ...] = ()
    max_restarts: int = DEFAULT_MAX_RESTARTS


def train(loaded: LoadedJob, options: TrainOptions) -> ExitCode:
    """Bring the job's run to its end, or to a clean stop.

    Raises:
        UserError: the job cannot run here, or a resume would break the contract; nothing was changed.
    """
    if options.fresh and options.resume:
        raise UserError("`--fresh` and `--resume` contradict each other", hints=["leave one of them out"])
    job, plan = plan_here(loaded, options.gpus)
    folder = RunFolder(Path(job.output_dir) / job.name)
    if options.dry_run:
        return _dry_run(folder, job, plan)
    _require_train_extra()
    folder.create()
    stop = StopAsked()
    with stop.listening(), RunLock(folder):
        if options.fresh:
            _set_old_run_aside(folder)
        for line in [*plan_lines(folder, plan), *claim_lines(job)]:
            tell(line)
        ready = make_ready(folder, job, plan.to_json(), stop, resume=options.resume, allowed=options.allow)
        if isinstance(ready, ExitCode):
            code = ready
        else:
            code = run_attempts(
                folder,
                plan.layout,
                ready.contract,
                ready.start,
                ready.choose,
                stop,
                max_restarts=options.max_restarts,
            )
    if code is ExitCode.DONE:
        not_kept = record_run(folder)
        if not_kept is not None and plan.estimate is not None:
            tell(not_kept)
        print(folder.final_model_dir)
    return code


def plan_here(loaded: LoadedJob, gpus: str | None) -> tuple[Job, Plan]:
    """Return the job with its global batch settled and the plan for this machine's devices."""
    job = loaded.job
    require_runnable(job)
    inventory = local_inventory(job.resources.device)
    devices = select_devices(inventory, gpus if gpus is not None else job.resources.gpus)
    given = {key for key, origin in loaded.origins.items() if origin.kind != "default"}
    folder = RunFolder(Path(job.output_dir) / job.name)
    everything = gpus is None and job.resources.gpus == "auto" and job.resources.ranks == "auto"
    wish = Wish(
        host=inventory.host,
        calibration=Calibration(stored_runs()),
        amount=Amount(samples_in(job)),
        may_leave_idle=everything,
        keep=_earlier_layout(folder),
    )
    job, plan = choose(job, given, tuple(devices), wish)
    return job, replace(plan, warnings=(*plan.warnings, *_host_memory_warnings(job, inventory.host)))


def _earlier_layout(folder: RunFolder) -> Layout | None:
    """Return the layout of the last attempt: what is free on a GPU changes, and what a run computes should not."""
    if not folder.plan_json.is_file():
        return None
    layout = read_json(folder.plan_json).get("layout", {})
    known = {field.name for field in fields(Layout)}
    return Layout(**layout) if layout.keys() == known else None


def _host_memory_warnings(job: Job, host: Host) -> list[str]:
    available, wanted_gib = host.memory_available_bytes, job.resources.host_memory_free_gib
    if isinstance(available, NotAvailable) or available >= wanted_gib * GIB:
        return []
    return [
        f"host memory: {available / GIB:.1f} GiB are available before the run starts, and "
        f"resources.host_memory_free_gib={wanted_gib:g} are to stay free"
    ]


def plan_lines(folder: RunFolder, plan: Plan) -> list[str]:
    """Return the choices with their reasons, warnings and advice, as printed before the ranks start."""
    lines = [f"Run folder: {folder.path}"]
    lines += [f"  {key} = {choice.value}  ({choice.reason})" for key, choice in sorted(plan.choices.items())]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    lines += [f"Learning rate: {line}" for line in plan.advice]
    return lines


def claim_lines(job: Job) -> list[str]:
    """Return what a guide claims for this job, marked as such; this run's own figures follow as it goes."""
    return [f"Claimed by the guide, not measured here: {what}: {figure}" for what, figure in job.claims.items()]


def worker_commands(folder: RunFolder, plan: Plan) -> list[str]:
    """Return the shell lines that start each rank by hand."""
    command = shlex.join([sys.executable, "-m", "trainwright.train", str(folder.path)])
    size = plan.layout.ranks
    return [f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={size} {command}" for rank in range(size)]


def _dry_run(folder: RunFolder, job: Job, plan: Plan) -> ExitCode:
    """Show what would run; a run folder that holds something already is left as it is."""
    for line in plan_lines(folder, plan):
        tell(line)
    if folder.path.exists() and any(folder.path.iterdir()):
        tell(f"{folder.path} is in use already, so nothing was written to it")
    else:
        folder.create()
        write_run_files(folder, job, plan.to_json())
    for command in worker_commands(folder, plan):
        print(command)
    return ExitCode.DONE


def _set_old_run_aside(folder: RunFolder) -> None:
    """Keep the old run, if there is one, under `<name>.old-N`; only the lock, which this process holds, stays."""
    if not folder.resolved_json.exists():
        return
    number = 1
    while (aside := folder.path.with_name(f"{folder.path.name}.old-{number}")).exists():
        number += 1
    aside.mkdir(mode=0o700)
    for entry in sorted(folder.path.iterdir()):
        if entry != folder.lock_file:
            entry.rename(aside / entry.name)
    tell(f"The old run is kept in {aside}")
    folder.create()


def _require_train_extra() -> None:
    import importlib.util

    for package in ("torch", "transformers", "peft", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise not_installed("training", package, extra="train", instead="see the plan alone: --dry-run")
