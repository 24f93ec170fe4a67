"""`trainwright submit`: the run folder, the script in it, and its jobs in Slurm's queue."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.reading import printable
from trainwright.hardware.slurm.commands import TIMEOUT_S, run_slurm, slurm_output
from trainwright.job.loading import LoadedJob
from trainwright.job.schema import Job
from trainwright.launch.planning import given_keys
from trainwright.launch.run_output import tell
from trainwright.launch.slurm.batch_script import ScriptInput, sbatch_options, script_text
from trainwright.launch.slurm.jobs import find_job
from trainwright.plan.job_model import checkpoint_bytes
from trainwright.plan.requirements import require_runnable
from trainwright.plan.slurm.slurm_request import SlurmRequest
from trainwright.plan.slurm.stop_lead import SaveTime, StopLead, stop_lead
from trainwright.plan.slurm.wait import Wait
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import RunLock
from trainwright.runs.records import read
from trainwright.runs.values import of_kind
from trainwright.runs.writing import read_json, write_json_atomic, write_text_atomic

KNOWN_STEPS: Final = 1000
"""Steps of which the longest counts for what the step under way may take."""
IfRefused: TypeAlias = Literal["keep", "cancel"]
"""What becomes of the links of a chain that Slurm took, where it refuses a later one."""

_NEEDED: Final = {"job", "given", "request", "allow", "chain", "cluster", "told_wait_s", "working_dir"}
"""Keys of job.json that every version has written."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What the batch process is told, in launcher/job.json; `given` are the keys that the user wrote.

    `chain`: it was asked for several jobs, each behind the one before; one with another behind it does not requeue
    itself. `told_wait_s` is how long Slurm said that it would wait, `lead` when the job is told of its time limit.
    """

    job: Job
    given: tuple[str, ...]
    request: SlurmRequest
    allow: tuple[str, ...] = ()
    chain: bool = False
    lead: StopLead = dataclasses.field(default_factory=StopLead)
    cluster: str = ""
    told_wait_s: float | None = None
    working_dir: str

    @property
    def folder(self) -> RunFolder:
        """The run."""
        return RunFolder(Path(self.job.output_dir) / self.job.name)

    @property
    def script_input(self) -> ScriptInput:
        """What the script is made of."""
        folder = self.folder
        return ScriptInput(
            name=self.job.name,
            request=self.request,
            job_json=folder.job_json,
            logs_dir=folder.logs_dir,
            working_dir=Path(self.working_dir),
            grace_s=self.lead.seconds,
        )

    def write(self) -> None:
        """Write launcher/job.json; the lives of its jobs are counted from now on."""
        self.folder.lives_jsonl.unlink(missing_ok=True)
        write_json_atomic(
            self.folder.job_json,
            {
                "schema_version": 1,
                "job": self.job.model_dump(mode="json"),
                "given": sorted(self.given),
                "request": self.request.to_json(),
                "allow": list(self.allow),
                "chain": self.chain,
                "stop_lead": dataclasses.asdict(self.lead),
                "cluster": self.cluster,
                "told_wait_s": self.told_wait_s,
                "working_dir": self.working_dir,
            },
        )

    @classmethod
    def read(cls, path: Path) -> Submission:
        """Return what `write` wrote.

        Raises:
            UserError: the file is damaged.
        """
        content: dict[str, Any] = read_json(path)
        if not isinstance(content, dict) or not content.keys() >= _NEEDED:
            raise UserError(f"{path} is damaged", hints=["submit the job again: trainwright submit JOB"])
        fields = {field.name for field in dataclasses.fields(SlurmRequest)}
        return cls(
            job=Job.model_validate(content["job"]),
            given=tuple(content["given"]),
            request=SlurmRequest(**{key: value for key, value in content["request"].items() if key in fields}),
            allow=tuple(content["allow"]),
            chain=content["chain"],
            lead=StopLead(**content.get("stop_lead", {})),
            cluster=content["cluster"],
            told_wait_s=content["told_wait_s"],
            working_dir=content["working_dir"],
        )


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """The jobs of the last submission, in launcher/submitted.json; of a chain, in their order."""

    job_ids: tuple[str, ...]
    submitted_at: str

    def write(self, folder: RunFolder) -> None:
        """Write the file."""
        write_json_atomic(folder.submitted_json, {"schema_version": 1, **dataclasses.asdict(self)})

    @classmethod
    def read(cls, folder: RunFolder) -> Submitted:
        """Return what `write` wrote.

        Raises:
            UserError: the run was never submitted, or the file is damaged.
        """
        try:
            content = read_json(folder.submitted_json)
        except FileNotFoundError:
            raise UserError(
                f"the run in {folder.path} was not submitted to Slurm",
                hints=["submit it: trainwright submit JOB"],
                exit_code=ExitCode.MISSING,
            ) from None
        try:
            return of_kind(cls, content if isinstance(content, dict) else {})
        except ValueError as error:
            raise UserError(
                f"{folder.submitted_json} does not say which jobs are the run's: it is damaged",
                hints=["squeue --me shows your jobs", f"trainwright submit {folder.resolved_json} submits it again"],
            ) from error


def new_submission(
    loaded: LoadedJob, request: SlurmRequest, cluster: str, wait: Wait, *, allow: Sequence[str], links: int
) -> Submission:
    """Return the submission of a job with a request, `links` jobs of it one after the other; `wait` is what Slurm told.

    Raises:
        UserError: the job cannot run like that, or Slurm refuses it.
    """
    if wait.refused is not None:
        raise UserError(
            f"Slurm would not take the job: {wait.refused}",
            hints=["see what there is to ask for: trainwright gpus --slurm"],
            exit_code=ExitCode.MISSING,
        )
    job = loaded.job
    require_runnable(job)
    if isinstance(job.resources.gpus, list):
        raise UserError(
            "resources.gpus names GPUs of one machine, and Slurm chooses which ones a job gets",
            hints=["resources.gpus=auto, and --gres says how many"],
        )
    ranks = 1 if job.resources.device == "cpu" and job.resources.ranks == "auto" else job.resources.ranks
    if ranks != "auto" and ranks % request.nodes:
        raise UserError(
            f"resources.ranks={ranks} on {request.nodes} nodes: torchrun starts as many ranks on each node",
            hints=[f"resources.ranks={request.gpus}"],
        )
    folder = RunFolder(Path(job.output_dir) / job.name)
    return Submission(
        job=job.model_copy(update={"output_dir": str(folder.path.parent)}),
        given=tuple(given_keys(loaded)),
        request=request,
        allow=tuple(allow),
        chain=links > 1,
        lead=lead_of(folder, job, request),
        cluster=cluster,
        told_wait_s=wait.told_s,
        working_dir=str(Path.cwd()),
    )


def lead_of(folder: RunFolder, job: Job, request: SlurmRequest) -> StopLead:
    """Return when the jobs of a run are told of their time limit, by what the run's saves took, else by estimate.

    Raises:
        UserError: the limit is too short.
    """
    saves = [event["save_s"] for event in read(folder.events_jsonl) if event.get("event") == "saved"]
    if saves:
        steps = [record.get("step_s") or 0.0 for record in read(folder.metrics_jsonl) if record.get("kind") == "train"]
        measured = SaveTime(step_s=max(steps[-KNOWN_STEPS:], default=0.0), save_s=max(saves), source="measured")
        return stop_lead(request.time_limit_min, measured)
    size = None if job.script is not None else checkpoint_bytes(job)
    return stop_lead(request.time_limit_min, None if size is None else SaveTime.estimate(size, request.nodes))


def tell_lead(lead: StopLead) -> None:
    """Say when the job is told of its time limit, and why."""
    tell(f"Stop signal: {lead}")
    if lead.warning is not None:
        tell(f"warning: {lead.warning}")


def live_jobs(folder: RunFolder, *, timeout_s: float = TIMEOUT_S) -> list[str]:
    """Return the ids of the run's jobs that wait or have nodes.

    Raises:
        UserError: the run was never submitted, or (exit 4) there is no Slurm here.
        SlurmAwayError: exit 4; Slurm does not answer within `timeout_s`.
    """
    jobs = [find_job(job_id, timeout_s=timeout_s) for job_id in Submitted.read(folder).job_ids]
    return [job.job_id for job in jobs if job is not None and job.is_live]


def submission_script(submission: Submission, template: Path | None = None) -> str:
    """Return the script of a submission; `template` is a file with a site's own.

    Raises:
        UserError: the template cannot be read, or no script can be made of it.
    """
    try:
        own = None if template is None else template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the template {template} cannot be read: {error}") from error
    return script_text(submission.script_input, own)


@contextmanager
def submitting(folder: RunFolder) -> Iterator[None]:
    """Keep every other submission of the run away until the caller has submitted its jobs and recorded them.

    Raises:
        UserError: another submission is under way, or a job of the run is in the queue or runs.
    """
    folder.create()
    folder.launcher_dir.mkdir(mode=0o700, exist_ok=True)
    with RunLock(folder, file=folder.submit_lock):
        if folder.submitted_json.exists() and (live := live_jobs(folder)):
            raise UserError(
                f"job {', '.join(live)} of the run {folder.path} is in the queue or runs",
                hints=[
                    f"trainwright status {folder.path}",
                    f"trainwright cancel {folder.path}",
                    "or give the run another name",
                ],
            )
        yield


def write_submission(submission: Submission, script: str) -> Path:
    """Write the files of a submission into the run folder, and return the path of the script."""
    folder = submission.folder
    folder.logs_dir.mkdir(mode=0o700, exist_ok=True)
    submission.write()
    write_text_atomic(folder.job_sbatch, script)
    return folder.job_sbatch


def submit(submission: Submission, links: int = 1, if_refused: IfRefused = "keep") -> Iterator[str]:
    """Give the written script to Slurm, `links` times in a chain, and yield each job's id once it is on record.

    Raises:
        UserError: exit 4; Slurm refuses it. The links that it took before are kept or cancelled as `if_refused` says.
    """
    submitted = Submitted(job_ids=(), submitted_at=datetime.datetime.now().astimezone().isoformat(timespec="seconds"))
    for _ in range(links):
        # After any end of the one before: after a good one only, the others would wait for ever behind a failure.
        behind = [f"--dependency=afterany:{submitted.job_ids[-1]}"] if submitted.job_ids else []
        try:
            job_id = _sbatch(submission, behind)
        except UserError as error:
            if not submitted.job_ids:
                raise
            raise _chain_cut(submission.folder, submitted.job_ids, links, if_refused, error) from error
        submitted = dataclasses.replace(submitted, job_ids=(*submitted.job_ids, job_id))
        submitted.write(submission.folder)
        yield job_id


def _chain_cut(
    folder: RunFolder, taken: Sequence[str], links: int, if_refused: IfRefused, error: UserError
) -> UserError:
    """Return the error of a chain of which Slurm took only some links, after doing with these what the user said."""
    jobs = f"{'job' if len(taken) == 1 else 'jobs'} {', '.join(taken)}"
    if if_refused == "cancel":
        slurm_output("scancel", *taken)
        kept, hints = f"{jobs} cancelled again", list(error.hints)
    else:
        kept = f"{jobs} kept: the run goes that far"
        hints = [
            f"when they have ended, go on: trainwright resume {folder.path}",
            f"or give them back: trainwright cancel {folder.path}",
            "--if-refused cancel does that by itself",
        ]
    return UserError(
        f"Slurm took {len(taken)} of the chain's {links} jobs, and refused the next",
        problems=[error.message, kept],
        hints=hints,
        exit_code=error.exit_code,
    )


def _sbatch(submission: Submission, more: list[str]) -> str:
    # On the command line too: SBATCH_* variables of a user or a site win over the script, and these over both.
    options = [*sbatch_options(submission.script_input), *more]
    done = run_slurm("sbatch", "--parsable", *options, str(submission.folder.job_sbatch))
    job_id = done.stdout.strip().split(";")[0]
    if done.returncode or not re.fullmatch(r"[0-9]+", job_id):
        said = printable(" ".join((done.stderr or done.stdout).split())) or f"exit {done.returncode}"
        raise UserError(
            f"Slurm does not take the job: {said}",
            hints=["see what there is to ask for: trainwright gpus --slurm"],
            exit_code=ExitCode.MISSING,
        )
    return job_id
