"""The batch process of a Slurm job: `python -m trainwright.launch.slurm.batch job.json`.

It plans for what the job really got, starts one launcher a node with srun, and has the job go on after a stop. What
it says goes to the job's .out; .err holds what others write.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any, Final

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.device_text import gpu_info_block, mixed_gpus_advice, mixed_gpus_block
from trainwright.hardware.inventory import Device
from trainwright.hardware.slurm.commands import run_slurm
from trainwright.job.schema import Job
from trainwright.launch.multi_node import built_in_trainer, on_nodes
from trainwright.launch.own_script.script_run import script_ranks
from trainwright.launch.run_end import telling_end
from trainwright.launch.slurm.allocation import Allocation, gpus_of, inventory_of, meeting_address, read_allocation
from trainwright.launch.slurm.jobs import HOLDING, WAITING, find_job
from trainwright.launch.slurm.lives import begin_life, require_progress
from trainwright.launch.slurm.submission import Submission, Submitted
from trainwright.launch.slurm.waiting import record_wait
from trainwright.launch.supervision import StopAsked
from trainwright.launch.train_run import DEFAULT_MAX_RESTARTS, TrainOptions, plan_on, run_planned
from trainwright.plan.choose import Plan
from trainwright.plan.explain import stage_line
from trainwright.plan.slurm.wait import PastWait
from trainwright.runs.lock import RunLock

_RULE: Final = "=" * 40


def main(job_json: Path) -> ExitCode:
    """Bring the run on as far as this job reaches.

    Raises:
        UserError: the run cannot go on; the job is to fail.
    """
    submission = Submission.read(job_json)
    folder, job_id = submission.folder, os.environ["SLURM_JOB_ID"]
    # Slurm may ask several times for one stop, and sends SIGKILL where it means to end all by force.
    stop = StopAsked(most=1)
    with stop.listening(), redirect_stderr(sys.stdout), telling_end(folder, submission.job) as end:
        _require_progress(submission, _behind(submission, job_id))
        begin_life(folder, submission.job, job_id, int(os.environ.get("SLURM_RESTART_COUNT", "0")))
        allocation = read_allocation(job_id)
        _say(*job_info(allocation))
        keep_wait(submission, allocation)
        job, plan = plan_there(submission, allocation)
        address = meeting_address(allocation)
        _say(f"Master address: {address}", _RULE, "Starting Training", _RULE)
        code = run_planned(
            folder,
            job,
            plan,
            TrainOptions(allow=submission.allow, max_restarts=DEFAULT_MAX_RESTARTS),
            stop,
            start_ranks=on_nodes(
                len(allocation.nodes),
                address,
                partial(_srun, len(allocation.nodes), submission.request.cpus),
                # On SIGTERM srun ends its step by force; every other signal it passes on to all processes of the
                # step, a user's own script among them, which SIGUSR2 would end before it has saved.
                stop_signal=signal.SIGUSR2 if job.script is None else None,
                command_of=(built_in_trainer if job.script is None else script_ranks(job, plan, len(allocation.nodes))),
            ),
            lock=RunLock(folder, is_gone=partial(is_gone, job_id)),
            telling=nullcontext(end),
        )
        if _end(submission, allocation, code):
            end.code = None
    return code


def job_info(allocation: Allocation) -> list[str]:
    """Return the Job Info block of a job's log (S0-35)."""
    again = f" (restart {allocation.job.restarts})" if allocation.job.restarts else ""
    return [
        _RULE,
        "Job Info",
        _RULE,
        f"Job ID: {allocation.job.job_id}{again}",
        f"Start time: {allocation.job.start}",
        f"Node: {', '.join(allocation.nodes)}",
        f"Number of GPUs: {allocation.gpus}",
    ]


def keep_wait(submission: Submission, allocation: Allocation) -> None:
    """Keep how long the job waited against what Slurm told, for later estimates; only of one that nothing held back."""
    job, request, told_s = allocation.job, submission.request, submission.told_wait_s
    if told_s is None or job.waited_s is None or job.restarts or "SLURM_JOB_DEPENDENCY" in os.environ:
        return
    not_kept = record_wait(
        PastWait(
            job_id=job.job_id,
            cluster=submission.cluster,
            partition=request.partition,
            gpu_type=request.gpu_type,
            gpus=request.gpus,
            told_s=told_s,
            waited_s=job.waited_s,
        )
    )
    if not_kept is not None:
        _say(not_kept)


def plan_there(submission: Submission, allocation: Allocation) -> tuple[Job, Plan]:
    """Plan for what the job got, and print it: GPUs, warnings, and the line of the strategy (S0-25 to S0-29, S0-36).

    Raises:
        UserError: the job does not run on that.
    """
    job = submission.job
    gpus = gpus_of(allocation)
    if gpus:
        types = [kind for of_node in allocation.types for kind in of_node]
        _say(*gpu_info_block(gpus), *mixed_gpus_block(gpus), *mixed_gpus_advice(types))
    inventory = inventory_of(allocation, job.resources.device)
    whole = len(allocation.nodes) > 1 or job.resources.gpus != "auto" or job.resources.ranks != "auto"
    made, plan = plan_on(job, submission.given, inventory, inventory.devices, may_leave_idle=not whole)
    _say(*strategy_lines(made, plan))
    if gpus and plan.layout.device == "cpu":
        _say(*_left_idle(submission, allocation, gpus))
    return made, plan


def strategy_lines(job: Job, plan: Plan) -> list[str]:
    """Return how the ranks share the work in a line, with the guide's own words for a ZeRO stage."""
    line = stage_line(job, plan)
    layout = plan.layout
    ranks = f"{layout.ranks} {'rank' if layout.ranks == 1 else 'ranks'}"
    return [*([line] if line else []), f"Plan: {ranks}, {layout.strategy}, {layout.precision}"]


def _left_idle(submission: Submission, allocation: Allocation, gpus: Sequence[Device]) -> list[str]:
    """Say what the GPUs of a job that asks for the processor would do."""
    job = submission.job
    resources = job.resources.model_copy(update={"device": "cuda", "ranks": "auto", "strategy": "auto"})
    inventory = inventory_of(allocation, "cuda")
    try:
        _, plan = plan_on(
            job.model_copy(update={"resources": resources}), submission.given, inventory, gpus, may_leave_idle=False
        )
    except UserError as error:
        return [f"warning: resources.device=cpu leaves the GPUs idle (on them: {error.message})"]
    return [
        "warning: resources.device=cpu leaves the GPUs idle; with resources.device=auto:",
        *strategy_lines(job, plan),
    ]


def is_gone(job_id: str, holder: Mapping[str, Any]) -> bool:
    """Say whether who holds the run lock has lost its nodes, whatever lives on there; `job_id` is this job.

    A node that Slurm has given up may still run an earlier life of this job; its attempt is fenced off.
    """
    held_by = holder.get("slurm_job_id")
    if not isinstance(held_by, str) or not held_by.isdigit():
        return False
    if held_by == job_id:
        return True
    job = find_job(held_by)
    return job is None or job.state not in HOLDING


def _srun(nodes: int, cpus: int, file: Path) -> list[list[str]]:
    options = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"]
    # Since 22.05 srun does not take over --cpus-per-task. Once a node's launcher has failed, the others wait in vain.
    launcher = [sys.executable, "-m", "trainwright.launch.node", str(file)]
    return [["srun", *options, "--kill-on-bad-exit=1", "--mpi=none", "--", *launcher]]


def _end(submission: Submission, allocation: Allocation, code: ExitCode) -> bool:
    """Have the run go on where it was stopped; return whether it does, by itself."""
    now = datetime.datetime.now().isoformat(timespec="seconds")
    if code is ExitCode.STOPPED:
        goes_on, said = _go_on(submission, allocation)
        _say(said)
        return goes_on
    _say(f"Job completed: {now}" if code is ExitCode.DONE else f"Job failed: {now} (exit {code:d})")
    if rest := _behind(submission, allocation.job.job_id):
        # Those that wait would find the run finished, or fail as this one did.
        run_slurm("scancel", *rest)
    return False


def _behind(submission: Submission, job_id: str) -> tuple[str, ...]:
    """Return the jobs of the chain after this one: none after its last, nor where Slurm refused the next."""
    # The first link may run before it is on record.
    is_known = submission.chain and submission.folder.submitted_json.exists()
    chain = Submitted.read(submission.folder).job_ids if is_known else ()
    return chain[chain.index(job_id) + 1 :] if job_id in chain else ()


def _go_on(submission: Submission, allocation: Allocation) -> tuple[bool, str]:
    """Have Slurm start this job once more; return whether the run goes on by itself, and what was done.

    Raises:
        UserError: the last lives brought nothing, so that no other begins.
    """
    folder, job_id = submission.folder, allocation.job.job_id
    by_hand = f"go on from the login node: trainwright resume {folder.path}"
    try:
        behind = [later for later in _behind(submission, job_id) if (job := find_job(later)) and job.is_live]
        job = find_job(job_id)
    except UserError as error:
        return False, f"Not requeued ({error.message}); {by_hand}"
    if job is not None and (job.restarts > allocation.job.restarts or job.state in WAITING):
        return True, "Slurm has put this job back into the queue"
    if not behind and (job is None or job.state != "RUNNING"):
        return False, "Stopped"  # cancelled: asked to start again, Slurm would undo that
    _require_progress(submission, behind)
    if behind:
        return True, "The next job of the chain goes on"
    try:
        done = run_slurm("scontrol", "requeue", job_id)
    except UserError as error:
        return False, f"Not requeued ({error.message}); {by_hand}"
    if done.returncode:
        return False, f"Not requeued ({' '.join(done.stderr.split())}); {by_hand}"
    return True, "Requeued: this job goes on from here"


def _require_progress(submission: Submission, behind: Sequence[str]) -> None:
    try:
        require_progress(submission.folder, submission.job)
    except UserError:
        if behind:
            run_slurm("scancel", *behind)
        raise


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except UserError as error:
        print(error.render(), flush=True)
        sys.exit(error.exit_code)
