"""`trainwright train`: one command that starts a run, resumes it, or says that it is finished."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from pathlib import Path

from trainwright.errors import ExitCode, UserError, not_installed
from trainwright.estimate.measured_runs import record_run
from trainwright.hardware.inventory import Device, Host, Inventory
from trainwright.hardware.reading import GIB, NotAvailable
from trainwright.job.loading import LoadedJob
from trainwright.job.schema import Job
from trainwright.launch.own_script.script_run import (
    close_script_run,
    make_script_ready,
    script_commands,
    script_out_of_memory,
    start_script_here,
    write_script_files,
)
from trainwright.launch.planning import devices_here, given_keys, traced_aloud
from trainwright.launch.prepare_run import make_ready, make_ready_with_less_memory, write_run_files
from trainwright.launch.run_end import RunEnd, telling_end
from trainwright.launch.run_output import tell
from trainwright.launch.supervision import (
    HARD_STOP_AFTER,
    StartRanks,
    StopAsked,
    rank_environment,
    run_attempts,
    start_here,
)
from trainwright.plan.choose import Plan, choose
from trainwright.plan.confirmed import IN_DOUBT, Tracing
from trainwright.plan.estimates import samples_in
from trainwright.plan.layout import Layout
from trainwright.plan.requirements import require_runnable
from trainwright.plan.wish import Wish
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import RunLock
from trainwright.runs.writing import read_json

DEFAULT_MAX_RESTARTS = 3


@dataclass(frozen=True)
class TrainOptions:
    """The flags of the command: how to run, never what to learn.

    `resume` is None, `latest` or a checkpoint folder; `allow` are the keys whose change a resume may take. `asked` is
    the job and its overrides as the user named them, for commands that are shown.
    """

    gpus: str | None = None
    resume: str | None = None
    fresh: bool = False
    dry_run: bool = False
    allow: tuple[str, ...] = ()
    max_restarts: int = DEFAULT_MAX_RESTARTS
    asked: tuple[str, ...] = ("JOB",)


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
        commands = worker_commands(folder, plan) if job.script is None else script_commands(folder, job, plan)
        return only_show(folder, job, plan, commands)
    stop = StopAsked()
    with stop.listening():
        return run_planned(folder, job, plan, options, stop)


def run_planned(
    folder: RunFolder,
    job: Job,
    plan: Plan,
    options: TrainOptions,
    stop: StopAsked,
    *,
    start_ranks: StartRanks | None = None,
    lock: AbstractContextManager[object] | None = None,
    telling: AbstractContextManager[RunEnd] | None = None,
) -> ExitCode:
    """Bring a planned run to its end, or to a clean stop.

    `start_ranks` starts the ranks of an attempt elsewhere than on this machine; `lock` is the run's, where it is not
    simply the first to come, or is held already; `telling` tells how it ended, where the caller knows more of it.

    Raises:
        UserError: the job cannot run here, or a resume would break the contract; nothing was changed.
    """
    run, usual_start = _run_script, start_script_here(job, plan)
    if job.script is None:
        require_train_extra()
        run, usual_start = _run_built_in, start_here
    folder.create()
    with lock or RunLock(folder):
        if options.fresh:
            _set_old_run_aside(folder)
        for line in [*plan_lines(folder, plan), *claim_lines(job)]:
            tell(line)
        with telling or telling_end(folder, job) as end:
            attempt = folder.attempt
            code = run(folder, job, plan, options, stop, start_ranks or usual_start)
            if code is not ExitCode.DONE or folder.attempt != attempt:  # else there was nothing left to do
                end.code = ExitCode.STOPPED if stop.times >= HARD_STOP_AFTER else code
    if code is ExitCode.DONE and job.script is None:
        _keep_measurements(folder, plan)
    if code is ExitCode.DONE:
        print(folder.final_model_dir if job.script is None else folder.output_dir)
    return code


def _keep_measurements(folder: RunFolder, plan: Plan) -> None:
    not_kept = record_run(folder)
    if not_kept is not None and plan.estimate is not None:
        tell(not_kept)


def _run_built_in(
    folder: RunFolder, job: Job, plan: Plan, options: TrainOptions, stop: StopAsked, start_ranks: StartRanks
) -> ExitCode:
    ready = make_ready(folder, job, plan.to_json(), stop, resume=options.resume, allowed=options.allow)
    if isinstance(ready, ExitCode):
        return ready
    return run_attempts(
        folder,
        ready,
        stop,
        with_less_memory=partial(
            make_ready_with_less_memory,
            folder,
            asked=options.asked,
            resume=options.resume,
            allowed=options.allow,
        ),
        max_restarts=options.max_restarts,
        start_ranks=start_ranks,
    )


def _run_script(
    folder: RunFolder, job: Job, plan: Plan, options: TrainOptions, stop: StopAsked, start_ranks: StartRanks
) -> ExitCode:
    ready = make_script_ready(folder, job, plan, resume=options.resume, allowed=options.allow)
    if isinstance(ready, ExitCode):
        return ready
    code = run_attempts(
        folder,
        ready,
        stop,
        with_less_memory=script_out_of_memory,
        max_restarts=options.max_restarts,
        start_ranks=start_ranks,
    )
    close_script_run(folder, plan.layout, samples_in(job), code)
    return code


def plan_here(loaded: LoadedJob, gpus: str | None) -> tuple[Job, Plan]:
    """Return the job with its global batch settled and the plan for this machine's devices."""
    job = loaded.job
    require_runnable(job)
    inventory, devices, may_leave_idle = devices_here(job, gpus)
    return plan_on(job, given_keys(loaded), inventory, devices, may_leave_idle=may_leave_idle)


def plan_on(
    job: Job, given: Collection[str], inventory: Inventory, devices: Sequence[Device], *, may_leave_idle: bool
) -> tuple[Job, Plan]:
    """Return the job with its global batch settled and the plan for these devices of the inventory.

    The layout of the run's last attempt is taken again where it still fits.
    """
    wish = Wish.of(
        job,
        inventory.host,
        runs_here=True,
        may_leave_idle=may_leave_idle,
        keep=_earlier_layout(RunFolder(Path(job.output_dir) / job.name)),
        tracing=Tracing(traced_aloud, from_share=IN_DOUBT),
    )
    job, plan = choose(job, given, tuple(devices), wish)
    return job, replace(plan, warnings=(*plan.warnings, *_host_memory_warnings(job, inventory.host)))


def _earlier_layout(folder: RunFolder) -> Layout | None:
    """Return the layout of the last attempt: what is free on a GPU changes, and what a run computes should not."""
    if not folder.plan_json.is_file():
        return None
    layout = read_json(folder.plan_json).get("layout", {})
    known = {field.name for field in fields(Layout)}
    needed = {field.name for field in fields(Layout) if field.default is MISSING}
    return Layout.from_json(layout) if needed <= layout.keys() <= known else None


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
    fits_on_the_host = plan.least is not None and plan.least.why_not is None and plan.layout.device != "cuda"
    if plan.not_known is not None and not fits_on_the_host:
        lines.append(plan.not_known)
    lines += [f"  {key} = {choice.value}  ({choice.reason})" for key, choice in sorted(plan.choices.items())]
    lines += [f"  {trace}" for trace in plan.traces]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    lines += [f"Learning rate: {line}" for line in plan.advice]
    return lines


def claim_lines(job: Job) -> list[str]:
    """Return what a guide claims for this job, marked as such; this run's own figures follow as it goes."""
    return [f"Claimed by the guide, not measured here: {what}: {figure}" for what, figure in job.claims.items()]


def worker_commands(folder: RunFolder, plan: Plan) -> list[str]:
    """Return the shell line that runs the planned ranks by hand: torchrun starts them, the first opens an attempt."""
    layout = plan.layout
    environment = rank_environment(layout, layout.ranks, None)
    words = ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable]
    words += ["-m", "trainwright.train.launcher", "torchrun", f"--nproc-per-node={layout.ranks}"]
    return [shlex.join([*words, "-m", "trainwright.train.under_torchrun", str(folder.path)])]


def only_show(folder: RunFolder, job: Job, plan: Plan, commands: Sequence[str]) -> ExitCode:
    """Write every file and print the commands that would run; a folder that holds something is left as it is."""
    for line in plan_lines(folder, plan):
        tell(line)
    if folder.path.exists() and any(folder.path.iterdir()):
        tell(f"{folder.path} is in use already, so nothing was written to it")
    else:
        folder.create()
        if job.script is None:
            write_run_files(folder, job, plan.to_json())
        else:
            write_script_files(folder, job, plan)
    for command in commands:
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


def require_train_extra() -> None:
    """Raise UserError (exit code 4) where a package that ranks need is not installed."""
    import importlib.util

    for package in ("torch", "transformers", "peft", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise not_installed("training", package, extra="train", instead="see the plan alone: --dry-run")
