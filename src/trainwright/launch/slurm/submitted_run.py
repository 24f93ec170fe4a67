"""A submitted run from outside: where it stands, its log, its end, and its next beginning."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.slurm.commands import SlurmAwayError, slurm_output
from trainwright.launch.resume import finished_record
from trainwright.launch.run_output import UNPRINTABLE, tell
from trainwright.launch.slurm.jobs import SlurmJob, find_job
from trainwright.launch.slurm.submission import (
    IfRefused,
    Submission,
    Submitted,
    lead_of,
    live_jobs,
    submit,
    submitting,
    tell_lead,
)
from trainwright.launch.slurm.waiting import expected_start
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import read
from trainwright.runs.values import whole

POLL_S: Final = 2.0
QUICK_S: Final = 5.0
"""How long Slurm may take to answer where the run folder says the rest. Its own programs try for minutes."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where a run stands; `state` is Slurm's word for the job at hand, None once Slurm has forgotten all of them.

    `step` is the last step trained, `checkpoint` the last one saved. `outcome` is finished, stopped, failed or lost
    once no job is left, None while one is. `slurm_error` says why Slurm could not be asked; what is known of the jobs
    is then None, and the rest is what the run folder says.
    """

    run: str
    job_ids: tuple[str, ...]
    job_id: str | None = None
    state: str | None = None
    reason: str | None = None
    nodes: str | None = None
    starts: str | None = None
    restarts: int = 0
    attempt: int
    step: int
    total_steps: int | None
    checkpoint: int | None
    outcome: str | None
    log: str | None
    slurm_error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the status as plain data."""
        return {"schema_version": 1, **dataclasses.asdict(self)}

    def lines(self) -> list[str]:
        """Return the status for people, with what to do where something is to be done."""
        of_all = f" of {self.total_steps:,}" if self.total_steps else ""
        saved = "nothing saved" if self.checkpoint is None else f"saved at step {self.checkpoint:,}"
        lines = [f"Run folder: {self.run}", f"Step {self.step:,}{of_all}, {saved}, attempt {self.attempt}"]
        if self.job_id is not None and self.state is not None:
            lines.append(self._job_line())
        if self.slurm_error is not None:
            lines.append(f"Job {', '.join(self.job_ids)}: not known ({self.slurm_error})")
        if self.restarts:
            lines.append(f"Restarted {self.restarts} times")
        if self.outcome is not None:
            lines.append(f"Outcome: {self.outcome}")
        if self.outcome in ("stopped", "failed", "lost"):
            lines.append(f"To go on: trainwright resume {self.run}")
        if self.log is not None:
            lines.append(f"Log: {self.log}")
        return lines

    def _job_line(self) -> str:
        reason = self.reason if self.reason not in (None, "None") else ""
        start = f"starts at the latest about {self.starts}" if self.starts else ""
        details = ", ".join(part for part in (self.nodes, reason, start) if part)
        return f"Job {self.job_id}: {self.state}" + (f" ({details})" if details else "")


def run_folder(run: str, output_dir: Path) -> RunFolder:
    """Return the folder of a run given by its name under `output_dir`, or by the folder itself.

    Raises:
        UserError: exit 4; there is no such run.
    """
    for path in (Path(run), output_dir / run):
        if (path / "run.json").is_file():
            return RunFolder(path.absolute())
    raise UserError(
        f"there is no run `{run}`, neither as a folder nor in {output_dir.absolute()}",
        hints=["give the run's folder, or the folder of its runs: --output-dir DIR"],
        exit_code=ExitCode.MISSING,
    )


def status_of(folder: RunFolder) -> Status:
    """Return where a run stands, from Slurm as long as it knows the jobs and from the run folder.

    Raises:
        UserError: the run was never submitted.
    """
    job_ids = Submitted.read(folder).job_ids
    job, starts, slurm_error = None, None, None
    try:
        job = _job_at_hand(job_ids)
        if job is not None and job.state == "PENDING":
            starts = expected_start(job.job_id, timeout_s=QUICK_S)
    except UserError as error:
        slurm_error = error.message
    checkpoints = folder.checkpoints()
    logs = job_logs(folder)
    return Status(
        run=str(folder.path),
        job_ids=job_ids,
        **_of_job(job),
        starts=starts,
        attempt=folder.attempt,
        step=_last_step(folder),
        total_steps=_total_steps(folder),
        checkpoint=checkpoints[0][0] if checkpoints else None,
        outcome=_outcome(folder, job, slurm_error),
        log=str(logs[-1]) if logs else None,
        slurm_error=slurm_error,
    )


def _job_at_hand(job_ids: Sequence[str]) -> SlurmJob | None:
    """Return the first job that lives, or the last one that Slurm still knows."""
    known = [job for job_id in job_ids if (job := find_job(job_id, timeout_s=QUICK_S)) is not None]
    live = [job for job in known if job.is_live]
    return live[0] if live else known[-1] if known else None


def _of_job(job: SlurmJob | None) -> dict[str, Any]:
    if job is None:
        return {}
    nodes = None if job.nodes == "(null)" else job.nodes
    return {"job_id": job.job_id, "state": job.state, "reason": job.reason, "nodes": nodes, "restarts": job.restarts}


def _last_step(folder: RunFolder) -> int:
    steps = [record for record in read(folder.metrics_jsonl) if record.get("kind") == "train"]
    return next((step for record in reversed(steps) if (step := whole(record, "step")) is not None), 0)


def job_logs(folder: RunFolder) -> list[Path]:
    """Return the output of the run's jobs, oldest first."""
    found = [path for path in folder.logs_dir.glob("train_*_*.out") if re.search(r"_\d+\.out$", path.name)]
    return sorted(found, key=lambda path: int(path.stem.rsplit("_", 1)[1]))


def said(folder: RunFolder) -> Iterator[str]:
    """Yield the lines of the run's log so far."""
    yield from _of_all_jobs(folder, {})


def follow(folder: RunFolder) -> Iterator[str]:
    """Yield the lines of the run's log as they come, from one job to the next, until no job is left.

    Where Slurm does not answer for a while, what the jobs write goes on, until the run is finished or it answers again.

    Raises:
        UserError: the run was never submitted, or (exit 4) there is no Slurm here.
    """
    read_bytes: dict[Path, int] = {}
    away, live = False, True
    while live:
        new = list(_of_all_jobs(folder, read_bytes))
        yield from new
        try:
            live = bool(live_jobs(folder, timeout_s=QUICK_S))
        except SlurmAwayError as error:
            live = bool(new) or _result(folder) is None
            if not away:
                tell(f"{error.message}; the log goes on")
            away = True
        else:
            if away:
                tell("Slurm answers again")
            away = False
        if live:
            time.sleep(POLL_S)
    yield from _of_all_jobs(folder, read_bytes)


def _of_all_jobs(folder: RunFolder, read_bytes: dict[Path, int]) -> Iterator[str]:
    for path in job_logs(folder):
        yield from _new_lines(path, read_bytes)


def cancel(folder: RunFolder) -> list[str]:
    """Cancel the run's jobs that live, and return their ids; the ranks save within the grace that the cluster gives.

    Raises:
        UserError: Slurm refuses.
    """
    live = live_jobs(folder)
    if live:
        slurm_output("scancel", *live)
    return live


def resume(folder: RunFolder, links: int = 1, if_refused: IfRefused = "keep") -> Iterator[str]:
    """Submit the run's script once more, and yield each job's id.

    Raises:
        UserError: it was never submitted, is finished, or a job of it lives; or Slurm refuses.
    """
    Submitted.read(folder)
    with submitting(folder):
        if (result := _result(folder)) is not None:
            raise UserError(f"the run is finished: {result}")
        submission = Submission.read(folder.job_json)
        lead = lead_of(folder, submission.job, submission.request)
        tell_lead(lead)
        again = dataclasses.replace(submission, chain=links > 1, lead=lead)
        again.write()
        yield from submit(again, links, if_refused)


def _result(folder: RunFolder) -> Path | None:
    """Return what the end of the run left: a model, or the output of a script of the user's own; None before it."""
    if finished_record(folder) is not None:
        return folder.final_model_dir
    return folder.output_dir if folder.finished_json.exists() else None


def _outcome(folder: RunFolder, job: SlurmJob | None, slurm_error: str | None) -> str | None:
    if job is not None and job.is_live:
        return None
    if _result(folder) is not None:
        return "finished"
    if slurm_error is not None:
        return None
    ends = [e for e in read(folder.events_jsonl) if e.get("event") in ("started", "stopped", "failed")]
    if ends and ends[-1]["event"] != "started":
        return str(ends[-1]["event"])
    if job is not None and job.state == "CANCELLED":
        return "stopped"
    return "failed" if job is not None and job.state == "FAILED" else "lost"


def _total_steps(folder: RunFolder) -> int | None:
    """What rank 0 last said of the course; None before it did."""
    logs = sorted(folder.logs_dir.glob("attempt_*/rank_0.log"), key=lambda path: path.stat().st_mtime)
    for path in reversed(logs):
        found = re.search(r"([\d,]+) steps in all", path.read_text(errors="replace"))
        if found:
            return int(found[1].replace(",", ""))
    return None


def _new_lines(path: Path, read_bytes: dict[Path, int]) -> Iterator[str]:
    with path.open("rb") as file:
        file.seek(read_bytes.get(path, 0))
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    read_bytes[path] = read_bytes.get(path, 0) + len(whole)
    for line in whole.decode("utf-8", "replace").splitlines():
        yield UNPRINTABLE.sub("", line)
