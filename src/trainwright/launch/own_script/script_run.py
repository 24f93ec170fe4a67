"""A run of a user's own script on this machine: its files, where it goes on from, and its processes."""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainwright.errors import ExitCode, UserError, not_installed
from trainwright.job.placeholders import names_in
from trainwright.job.schema import Job
from trainwright.launch.failures import Failure, read_failures
from trainwright.launch.files.launch_script import SCRIPT_JSON
from trainwright.launch.files.nodes import Nodes
from trainwright.launch.files.plan_folder import write_files
from trainwright.launch.files.script_json import script_start, script_values
from trainwright.launch.multi_node import CommandOf
from trainwright.launch.own_script.checkpoints import newest_checkpoint
from trainwright.launch.own_script.script_checks import check_attempt
from trainwright.launch.own_script.starting import RANK_MODULE, launcher_command
from trainwright.launch.processes import Processes
from trainwright.launch.resume import Start
from trainwright.launch.run_output import tell
from trainwright.launch.supervision import Ready, StartRanks, rank_environment
from trainwright.plan.choose import Plan
from trainwright.plan.layout import Layout
from trainwright.plan.own_script import own_script
from trainwright.runs.folder import RunFolder
from trainwright.runs.writing import read_json, write_json_atomic

COLLATERAL_S = 5.0
"""A rank that a signal ended so long after the first failure was ended by its launcher."""
GEOMETRY = {
    "resume_from",
    "output_dir",
    "ranks",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "eval_batch_size",
    "precision",
    "strategy",
    "gradient_checkpointing",
    "accelerate_config",
    "deepspeed_config",
}
"""What another attempt may be told otherwise, as it may have other GPUs."""


def make_script_ready(
    folder: RunFolder, job: Job, plan: Plan, *, resume: str | None, allowed: Collection[str]
) -> Ready | ExitCode:
    """Write the run's files and choose its start; return DONE where the script has come to its end already.

    Raises:
        UserError: another command has written what is in the output folder; nothing was changed.
    """
    _require_launcher(own_script(job).launcher.value, Nodes.of(plan).count)
    told = told_to_script(job, plan)
    _require_same_command(folder, told, allowed)
    write_script_files(folder, job, plan)
    if resume is None and folder.finished_json.exists():
        tell(f"Already finished: {folder.output_dir} (`--fresh` runs the script again)")
        return ExitCode.DONE
    choose = partial(choose_script_start, folder, job, resume=resume)
    return Ready(plan.layout, {"script": told}, choose(), choose)


def write_script_files(folder: RunFolder, job: Job, plan: Plan) -> None:
    """Write what was asked and decided into the run folder, with the files that the launcher reads."""
    write_json_atomic(folder.resolved_json, job.model_dump(mode="json"))
    write_json_atomic(folder.plan_json, plan.to_json())
    folder.launcher_dir.mkdir(mode=0o700, exist_ok=True)
    write_files(folder.launcher_dir, job, plan, of_run=True)


def script_commands(folder: RunFolder, job: Job, plan: Plan) -> list[str]:
    """Return the shell lines of the launcher, and of the command that each rank then runs."""
    start = script_start(job, plan, folder.launcher_dir)
    launcher = launcher_command(start, folder.launcher_dir / SCRIPT_JSON)
    return [shlex.join(launcher), shlex.join(start.command)]


def _require_launcher(launcher: str, nodes: int) -> None:
    """Refuse a launcher that is not installed, or that cannot start several nodes.

    Raises:
        UserError: with what to install or choose.
    """
    if launcher == "deepspeed" and nodes > 1:
        raise UserError(
            "DeepSpeed's own launcher starts other nodes by itself, which is not used here",
            hints=["launcher: torchrun starts a DeepSpeed script alike"],
            exit_code=ExitCode.USAGE,
        )
    package = {"torchrun": "torch"}.get(launcher, launcher)
    if launcher != "python" and importlib.util.find_spec(package) is None:
        raise not_installed(f"the launcher {launcher}", package, extra="train", instead="see the plan alone: --dry-run")


def told_to_script(job: Job, plan: Plan) -> dict[str, Any]:
    """Return the command as the job has it, and what it is told that must stay the same over attempts."""
    assert job.script is not None
    values = script_values(job, plan, own_script(job), Path("/"), 1, None)
    return {"script": job.script} | {name: values[name] for name in sorted(names_in(job.script) - GEOMETRY)}


def _require_same_command(folder: RunFolder, told: Mapping[str, Any], allowed: Collection[str]) -> None:
    start_json = folder.latest_logs / "start.json"
    has_output = folder.output_dir.is_dir() and any(folder.output_dir.iterdir())
    if not start_json.is_file() or not (has_output or folder.finished_json.exists()):
        return
    before = read_json(start_json)["contract"].get("script", {})
    changed = [key for key in {**before, **told} if before.get(key) != told.get(key) and key not in allowed]
    if changed:
        raise UserError(
            f"what is in {folder.output_dir} was made by another command",
            problems=[f"{key}: {json.dumps(before.get(key))} -> {json.dumps(told.get(key))}" for key in changed],
            hints=[
                "to go on all the same: " + " ".join(f"--allow {key}" for key in changed),
                "undo the change, or give the run another `name`",
                "`--fresh` starts again from nothing; the old folder is kept under another name",
            ],
        )


def choose_script_start(folder: RunFolder, job: Job, *, resume: str | None) -> Start:
    """Return where the script is told to go on from: its newest checkpoint, or the one that `resume` names.

    Raises:
        UserError: a checkpoint is asked for, and there is none.
    """
    assert job.script is not None
    if resume not in (None, "latest"):
        path = Path(resume).absolute()
        return Start(path, 0, (f"Resuming from {path}",))
    found = newest_checkpoint(folder.output_dir)
    if found.path is None and resume == "latest":
        raise UserError(
            f"no checkpoint of the script is recognised in {folder.output_dir} (`checkpoint-N`)",
            problems=found.skipped,
            hints=["`--resume PATH` names one"],
            exit_code=ExitCode.NO_VALID_CHECKPOINT,
        )
    lines = list(found.skipped)
    takes_it = "resume_from" in names_in(job.script)
    if found.path is not None and takes_it:
        lines.append(f"Resuming from {found.path.name} (the script's own; that it is whole is not proved)")
    elif found.path is not None:
        lines.append(f"The script is not told of {found.path.name}: the command has no {{resume_from}}")
    elif folder.output_dir.is_dir() and any(folder.output_dir.iterdir()):
        lines.append(
            f"No checkpoint of the script is recognised in {folder.output_dir} (`checkpoint-N`): it begins anew"
        )
    return Start(found.path, found.step, tuple(lines))


def start_script_here(job: Job, plan: Plan) -> StartRanks:
    """Return what starts an attempt of the job's script on this machine."""

    def start(folder: RunFolder, layout: Layout, attempt: int) -> Processes:
        script_json = _write_start(folder, job, plan, attempt, 1)
        folder.rank_log(attempt, 0).touch(mode=0o600)
        processes = ScriptProcesses(ranks=layout.ranks)
        environment = rank_environment(layout, layout.ranks, attempt)
        log = folder.attempt_dir(attempt) / "launcher.log"
        processes.start("trainwright.launch.own_script.local", [str(script_json)], environment, log)
        return processes

    return start


def script_out_of_memory(cause: Failure, attempt: int) -> Ready:
    """Refuse to go on: what a script does with less memory is not known here.

    Raises:
        UserError: always, with what to change.
    """
    raise UserError(
        f"{cause.describe()}\nthe memory of the script ran out in attempt {attempt}",
        hints=[
            "train.micro_batch_size=N with fewer samples than now, if the script is told {micro_batch_size}",
            "or resources.strategy=fsdp2, zero2 or zero3, where the script can share its model",
        ],
        exit_code=ExitCode.OUT_OF_MEMORY,
    )


def close_script_run(folder: RunFolder, layout: Layout, samples: int | None, code: ExitCode) -> None:
    """Print the checks of the last attempt, and leave word where the script came to its end."""
    start = read_json(folder.latest_logs / "start.json")
    if (folder.latest_logs / "script.json").exists():
        for check in check_attempt(folder, start["attempt"], layout, samples):
            tell(str(check))
    if code is ExitCode.DONE:
        write_json_atomic(folder.finished_json, {"attempt": start["attempt"], "contract": start["contract"]})


def script_ranks(job: Job, plan: Plan, nodes: int) -> CommandOf:
    """Return what torchrun starts in each rank of a script on several nodes."""

    def command(folder: RunFolder, attempt: int) -> tuple[str, ...]:
        return ("-m", RANK_MODULE, str(_write_start(folder, job, plan, attempt, nodes)))

    return command


def _write_start(folder: RunFolder, job: Job, plan: Plan, attempt: int, nodes: int) -> Path:
    resume_from = read_json(folder.attempt_dir(attempt) / "start.json")["resume_from"]
    return script_start(
        job,
        plan,
        folder.launcher_dir,
        nodes=nodes,
        attempt=attempt,
        resume_from=Path(resume_from) if resume_from else None,
    ).write()


@dataclass
class ScriptProcesses(Processes):
    """The launchers of a script's nodes, one child each; their ranks write down how they ended."""

    ranks: int = 1

    def failures(self, attempt_dir: Path) -> list[Failure]:
        """Return the failures of the script's ranks, or that of the launcher where no rank came to be."""
        if self.killed and not any(code not in (None, 0, 75) for code in self.exit_codes()):
            return []
        failures = [
            failure if failure.killed else replace(failure, exit_code=int(ExitCode.FAILED))
            for failure in read_failures(attempt_dir, [_exit_code(attempt_dir, rank) for rank in range(self.ranks)], ())
        ]
        first_s = min((failure.time_s for failure in failures), default=0.0)
        own = [f for f in failures if not f.killed or f.time_s <= first_s + COLLATERAL_S]
        own = [f for f in own if f.signal_name != "SIGTERM"] or own
        return own or [_launcher_failure(attempt_dir)]


def _exit_code(attempt_dir: Path, rank: int) -> int | None:
    """Return how a rank ended: None where it never began, that of SIGKILL where it left no word."""
    for what in ("ended", "error"):
        with suppress(FileNotFoundError, ValueError):
            return int(json.loads((attempt_dir / f"rank_{rank}.{what}.json").read_text())["exit_code"])
    return -9 if (attempt_dir / f"rank_{rank}.started.json").exists() else None


def _launcher_failure(attempt_dir: Path) -> Failure:
    log = attempt_dir / "launcher.log"
    last_words = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    return Failure(0, int(ExitCode.FAILED), None, 0.0, f"the launcher ended before the script began:\n{last_words}")
