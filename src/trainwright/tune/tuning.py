"""`trainwright tune`: the micro-batches of a job on the devices of this machine, measured and kept."""

from __future__ import annotations

import dataclasses
import datetime
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.reading import GIB
from trainwright.job.loading import LoadedJob
from trainwright.job.preset import PREFIX
from trainwright.job.schema import Job
from trainwright.launch.less_memory import remedies
from trainwright.launch.planning import devices_here, given_keys
from trainwright.launch.run_output import tell
from trainwright.launch.supervision import StopAsked
from trainwright.out_of_memory import first_words
from trainwright.plan.choose import Plan, choose
from trainwright.plan.layout import Layout
from trainwright.plan.requirements import require_runnable
from trainwright.plan.search import EVAL_FACTOR
from trainwright.plan.tuned import (
    LEVELS,
    MeasuredMicroBatch,
    Setting,
    Tuned,
    answer_for,
    keep,
    setting_of,
    stored_answers,
)
from trainwright.plan.wish import Wish
from trainwright.runs.folder import RunFolder
from trainwright.tune.job_file import set_in_job
from trainwright.tune.probes import HOST_MEMORY, Probes, ProbeWatch, WorkerProbes, evaluations_for, host_left_bytes
from trainwright.tune.scripts import ScriptProbes, require_micro_batch_field
from trainwright.tune.search import RUNGS, ProbeSearch, sizes_of

USE_UP_TO = {"conservative": 0.70, "recommended": 0.85, "aggressive": 0.90}
"""Share of memory that a level stays within: the guide's own upper ends of 14 and 18 GB of 20 (S2-07), and the 70 to
85 % of its optimum (S2-16). `extreme` is the largest that runs."""
OF_THE_LARGEST = {"conservative": 1 / 2, "recommended": 2 / 3, "aggressive": 5 / 6}
"""The same where memory is not known: 12, 16 and 20 of 24 (S2-36)."""

OpenProbes = Callable[[RunFolder, Job, Plan, ProbeWatch], Probes]


@dataclass(frozen=True)
class TuneOptions:
    """The flags of the command; `asked` is the job and its overrides as the user named them."""

    gpus: str | None = None
    level: str = "recommended"
    write: bool = False
    fresh: bool = False
    timeout_s: float = 600.0
    asked: tuple[str, ...] = ("JOB",)


@dataclass(frozen=True)
class TuningResult:
    """What was found, for which plan, and whether it was known `before` or where it is `kept` now."""

    job: Job
    plan: Plan
    tuned: Tuned
    before: bool
    kept: Path | None = None

    @property
    def layout(self) -> Layout:
        """The layout that later runs of the job begin with."""
        return self.tuned.layout(self.plan.layout, self.job)


def tune(loaded: LoadedJob, options: TuneOptions, *, open_probes: OpenProbes = WorkerProbes) -> TuningResult:
    """Measure which micro-batches run and how fast, and keep the answer; one that is kept already is returned.

    Raises:
        UserError: nothing runs (exit code 77), the job fails for another reason, or a stop was asked for (75).
    """
    if options.level not in LEVELS:
        raise UserError(f"--level {options.level} is unknown", hints=[f"choose one of {', '.join(LEVELS)}"])
    if options.write and options.asked[0].startswith(PREFIX):
        raise UserError("a preset is not written to", hints=["copy it into a job file of your own"])
    job, plan = _planned(loaded, options.gpus)
    answer = None if options.fresh else _known(job, plan, options.level)
    if answer is None:
        answer = _measured(job, plan, options, open_probes)
        try:
            answer = dataclasses.replace(answer, kept=keep(answer.tuned))
        except (OSError, RuntimeError) as error:
            tell(f"warning: later commands will not know of it: {error}")
    if options.write:
        _write(Path(options.asked[0]), answer)
    return answer


def _planned(loaded: LoadedJob, gpus: str | None) -> tuple[Job, Plan]:
    """Return the job with its global batch settled and its batch sizes open, and what is planned without tuning."""
    job = loaded.job
    require_runnable(job)
    if job.script is not None:
        require_micro_batch_field(job)
    inventory, devices, may_leave_idle = devices_here(job, gpus)
    wish = Wish.of(job, inventory.host, runs_here=True, may_leave_idle=may_leave_idle)
    settled, plan = choose(job, given_keys(loaded), devices, dataclasses.replace(wish, tuned=()))
    open_batch = settled.train.model_copy(update={"micro_batch_size": "auto", "gradient_accumulation_steps": "auto"})
    return settled.model_copy(update={"train": open_batch}), plan


def _known(job: Job, plan: Plan, level: str) -> TuningResult | None:
    tuned = answer_for(setting_of(job, plan.layout, plan.devices), stored_answers())
    if tuned is None or tuned.global_batch_size != plan.layout.global_batch_size:
        return None
    if tuned.level == level:
        return TuningResult(job, plan, tuned, before=True)
    other = dataclasses.replace(tuned, level=level)
    return TuningResult(job, plan, other, before=True, kept=keep(other))


def _measured(job: Job, plan: Plan, options: TuneOptions, open_probes: OpenProbes) -> TuningResult:
    layout = plan.layout
    share = -(-layout.global_batch_size // layout.ranks)
    host_free = round(job.resources.host_memory_free_gib * GIB)
    if (left := host_left_bytes()) is not None and left < host_free:
        raise UserError(
            f"{left / GIB:.1f} GiB of host memory are available, and {host_free / GIB:g} are to stay free",
            hints=["end other programs", "or set resources.host_memory_free_gib lower"],
            exit_code=ExitCode.OUT_OF_MEMORY,
        )
    search = ProbeSearch(sizes_of(share), layout.micro_batch_size, share, at_once=RUNGS if job.script is None else 1)
    stop = StopAsked(most=1)
    with tempfile.TemporaryDirectory(prefix="trainwright-tune-") as place, stop.listening():
        watch = ProbeWatch(stop, options.timeout_s, host_free)
        inside = job.model_copy(update={"output_dir": place})
        if job.script is None:
            probes = open_probes(RunFolder(Path(place) / job.name), inside, plan, watch)
        else:
            probes = ScriptProbes(Path(place), job, plan, watch)
        _climb(search, probes, job)
        longest = getattr(probes, "longest", None)
    if not search.rungs:
        raise _nothing_runs(search, job, layout, options)
    setting = setting_of(job, layout, plan.devices)
    if longest is not None and longest >= job.data.max_length:
        setting = dataclasses.replace(setting, data=None)
    return TuningResult(job, plan, _answer(search, setting, layout.global_batch_size, options.level), before=False)


def _climb(search: ProbeSearch, probes: Probes, job: Job) -> None:
    """Probe until nothing is left to find out, and tell what each probe found."""
    while sizes := search.next_sizes():
        number = search.probes + search.lost + 1
        in_turn = ", in turn, as times differ" if len(set(sizes)) < len(sizes) else ""
        tell(f"Probe {number}: micro-batch {', '.join(map(str, dict.fromkeys(sizes)))}{in_turn}")
        evaluations = evaluations_for(job, sizes[-1], search.evaluated, search.evaluation_too_large)
        outcome = probes.run(sizes, evaluations)
        search.take(outcome)
        if outcome.lost_at is not None:
            tell(f"  lost at {outcome.lost_at}, which says nothing of its memory: {first_words(outcome.why or '')}")
        elif outcome.too_large is not None:
            tell(f"  {outcome.too_large} is too large: {reason_of(outcome.why)}")
        elif outcome.evaluation_too_large is not None:
            tell(f"  an evaluation of {outcome.evaluation_too_large} is too large: {reason_of(outcome.why)}")


def reason_of(said: str | None) -> str:
    """Return why a micro-batch did not run, on one line."""
    return first_words(said or "").removeprefix("error: ")


def _nothing_runs(search: ProbeSearch, job: Job, layout: Layout, options: TuneOptions) -> UserError:
    said = search.why or ""
    if not search.is_hopeless:
        return UserError(
            f"no probe came to an answer: {search.lost} were killed or hung",
            hints=["--timeout SECONDS gives each more time", "`trainwright doctor JOB` looks for what else is wrong"],
            exit_code=ExitCode.HANG,
        )
    return UserError(
        f"not even a micro-batch of {search.too_large} runs",
        problems=[reason_of(said)],
        hints=remedies(job, layout, said, options.asked) if HOST_MEMORY not in said else ["end other programs"],
        exit_code=ExitCode.OUT_OF_MEMORY,
    )


def _answer(search: ProbeSearch, setting: Setting, global_batch_size: int, level: str) -> Tuned:
    points = search.points()
    return Tuned(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        setting=setting,
        global_batch_size=global_batch_size,
        points=points,
        levels=levels_of(points, limited=search.too_large is not None),
        level=level,
        too_large=search.too_large,
        why=None if search.why is None else reason_of(search.why),
        evaluated=search.evaluated,
        probes=search.probes + search.lost,
        steps=search.steps,
    )


def levels_of(points: Sequence[MeasuredMicroBatch], *, limited: bool) -> dict[str, int]:
    """Return the named levels: of those within a level's share of memory the largest; `recommended` is the fastest.

    Where memory is not known a level is a part of the largest that ran, or, if none was too large, all of it.
    """
    sizes: dict[str, int] = {}
    for level in LEVELS[:-1]:
        within = _within_level(level, points, limited)
        chosen = (within or points[:1])[-1]
        if level == "recommended" and within and all(point.step_s is not None for point in within):
            chosen = min(within, key=lambda point: point.step_s or 0.0)
        sizes[level] = chosen.micro_batch_size
    return {**sizes, "extreme": points[-1].micro_batch_size}


def _within_level(level: str, points: Sequence[MeasuredMicroBatch], limited: bool) -> list[MeasuredMicroBatch]:
    if all(point.used_share is not None for point in points):
        return [point for point in points if (point.used_share or 0.0) <= USE_UP_TO[level]]
    if limited:
        largest = points[-1].micro_batch_size
        return [point for point in points if point.micro_batch_size <= OF_THE_LARGEST[level] * largest]
    return list(points)


def _write(path: Path, answer: TuningResult) -> None:
    """Put the micro-batch into the job file, and the evaluation's batch where it is not the usual one.

    Raises:
        UserError: the file is not written in lines that can be changed one by one; with what to write.
    """
    layout = answer.layout
    values: dict[tuple[str, str], int] = {("train", "micro_batch_size"): layout.micro_batch_size}
    if answer.job.eval.batch_size == "auto" and layout.eval_batch_size != EVAL_FACTOR * layout.micro_batch_size:
        values["eval", "batch_size"] = layout.eval_batch_size
    set_in_job(path, values)
    tell(f"wrote {path}: " + ", ".join(f"{'.'.join(key)}={value}" for key, value in values.items()))
