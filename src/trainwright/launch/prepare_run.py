"""What stands before the first rank of a run: its files, its data, and where it goes on from.

`python -m trainwright.launch.prepare_run DIR` does it for ranks that torchrun starts: DIR is what `trainwright plan
--write` wrote. It opens an attempt of the run and prints its number as JSON, null when the run is finished already.
The caller holds the run lock.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainwright.errors import ExitCode, UserError
from trainwright.job.schedule import scaled_learning_rate
from trainwright.job.schema import Job
from trainwright.launch.contract import contract_of
from trainwright.launch.failures import Failure
from trainwright.launch.files.deepspeed import engine_config
from trainwright.launch.less_memory import as_remembered, changed_plan, remedies, remember, smaller
from trainwright.launch.resume import Start, choose_start, finished_record, is_finished
from trainwright.launch.run_output import tell
from trainwright.launch.supervision import Ready, StopAsked, list_run, open_attempt, run_prepare
from trainwright.out_of_memory import first_words
from trainwright.plan.choose import RATE
from trainwright.plan.layout import Layout
from trainwright.runs.folder import RunFolder
from trainwright.runs.writing import read_json, write_json_atomic


def make_ready(
    folder: RunFolder,
    job: Job,
    plan: Mapping[str, Any],
    stop: StopAsked,
    *,
    resume: str | None = None,
    allowed: Collection[str] = (),
) -> Ready | ExitCode:
    """Write the run's files, prepare its data and choose its start; return an exit code where nothing is to be run.

    `plan` is what plan.json holds. A layout whose memory did not suffice in an earlier attempt gives way to the one
    that followed it.

    Raises:
        UserError: a resume would break the contract; what the folder says of its run is as it was.
    """
    remembered = as_remembered(folder, Layout.from_json(plan["layout"]))
    plan = changed_plan(plan, remembered)
    for line in remembered.lines:
        tell(line)
    with _unchanged_if_refused(folder):
        job, plan = _at_its_own_rate(folder, job, plan)
        write_run_files(folder, job, plan)
        code = run_prepare(folder, stop)
        if code is not ExitCode.DONE:
            return code
        contract = _contract(folder, job, remembered.layout, plan)
        if resume is None and is_finished(folder, contract, allowed):
            tell(f"Already finished: {folder.final_model_dir} (`--fresh` trains again)")
            return ExitCode.DONE
        return _ready(folder, job, remembered.layout, plan, resume, allowed)


def make_ready_with_less_memory(
    folder: RunFolder,
    cause: Failure,
    attempt: int,
    *,
    asked: Sequence[str],
    resume: str | None = None,
    allowed: Collection[str] = (),
) -> Ready:
    """Change the run's layout to one that needs less memory, and say so.

    `cause` is what ended `attempt`; `asked` is the job and its overrides as the user named them.

    Raises:
        UserError: the job allows no layout that needs less (exit code 77), with commands that would.
    """
    job, plan = Job.model_validate(read_json(folder.resolved_json)), read_json(folder.plan_json)
    layout = Layout.from_json(plan["layout"])
    change = None
    if not (cause.killed_by_kernel and layout.device == "cuda"):  # a micro-batch lies in the GPU's memory
        doing = cause.out_of_memory_in or "training"
        change = smaller(job, layout, doing, f"memory ran out in {doing}, attempt {attempt}")
    if change is None:
        raise UserError(
            "out of memory, and the job allows no layout that needs less",
            problems=[first_words(cause.text) or cause.describe()],
            hints=remedies(job, layout, cause.text, asked),
            exit_code=ExitCode.OUT_OF_MEMORY,
        )
    remember(folder, attempt, layout, change)
    for line in change.lines:
        tell(line)
    plan = changed_plan(plan, change)
    write_run_files(folder, job, plan)
    return _ready(folder, job, change.layout, plan, resume, allowed)


def _contract(folder: RunFolder, job: Job, layout: Layout, plan: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return contract_of(job, layout, plan["learning_rate"], read_json(folder.prepared_json))


def _ready(
    folder: RunFolder,
    job: Job,
    layout: Layout,
    plan: Mapping[str, Any],
    resume: str | None,
    allowed: Collection[str],
) -> Ready:
    def choose() -> Start:
        # Asked anew before each restart: the ranks will read the base model again, which may be another by then.
        return choose_start(folder, _contract(folder, job, layout, plan), resume=resume, allowed=allowed)

    return Ready(layout, _contract(folder, job, layout, plan), choose(), choose, job.resources.hang_timeout_s)


def _at_its_own_rate(folder: RunFolder, job: Job, plan: Mapping[str, Any]) -> tuple[Job, Mapping[str, Any]]:
    """Return job and plan with the learning rate that the run has had so far, where the job names none."""
    begun = bool(folder.checkpoints()) or finished_record(folder) is not None
    if RATE not in plan["choices"] or not begun:
        return job, plan
    rate, usual = read_json(folder.resolved_json)["train"]["learning_rate"], job.train.learning_rate
    if rate == usual:
        return job, plan
    train = job.train.model_copy(update={"learning_rate": rate})
    tell(f"Learning rate: {rate:g}, as this run has had so far ({usual:g} would be usual for a new one)")
    peak = rate
    if train.lr_scaling != "none":
        assert train.lr_scaling_base is not None
        peak = scaled_learning_rate(rate, train.lr_scaling_base, train.global_batch_size, train.lr_scaling)
    choices = {**plan["choices"], RATE: {"value": rate, "reason": "as this run has had so far"}}
    return job.model_copy(update={"train": train}), {**plan, "learning_rate": peak, "choices": choices}


def write_run_files(folder: RunFolder, job: Job, plan: Mapping[str, Any]) -> None:
    """Write what was asked and what was decided into the run folder, where the ranks read it."""
    write_json_atomic(folder.resolved_json, job.model_dump(mode="json"))
    write_json_atomic(folder.plan_json, plan)
    folder.launcher_dir.mkdir(mode=0o700, exist_ok=True)
    layout = Layout.from_json(plan["layout"])
    if layout.strategy.startswith("zero"):
        write_json_atomic(folder.deepspeed_json, engine_config(job, layout))


def main(planned: Path) -> ExitCode:
    """Open an attempt of the run planned in the folder `planned` and print `{"attempt": number or null}`."""
    job = Job.model_validate(read_json(planned / "resolved.json"))
    folder = RunFolder(Path(job.output_dir) / job.name)
    stop = StopAsked()
    with stop.listening():
        ready = make_ready(folder, job, read_json(planned / "plan.json"), stop)
    if ready is ExitCode.DONE:
        print(json.dumps({"attempt": None}))
        return ExitCode.DONE
    if isinstance(ready, ExitCode):
        return ready
    list_run(folder)
    print(json.dumps({"attempt": open_attempt(folder, ready.contract, ready.start)}))
    return ExitCode.DONE


@contextmanager
def _unchanged_if_refused(folder: RunFolder) -> Iterator[None]:
    """Leave what the run folder says of its run as it was, if this command turns out to be refused."""
    described = (folder.resolved_json, folder.plan_json, folder.prepared_json, folder.deepspeed_json)
    before = {path: read_json(path) for path in described if path.exists()}
    try:
        yield
    except UserError:
        for path, content in before.items():
            write_json_atomic(path, content)
        raise


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except UserError as error:
        print(error.render(), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
