"""`trainwright scaling`: a short run of the job for every count, and what they say together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from trainwright.errors import ExitCode, UserError
from trainwright.hardware.choice import Choice
from trainwright.hardware.local import local_inventory
from trainwright.hardware.selection import select_devices
from trainwright.job.loading import LoadedJob
from trainwright.launch.run_output import tell
from trainwright.launch.supervision import StopAsked
from trainwright.launch.train_run import require_train_extra
from trainwright.plan.requirements import require_runnable
from trainwright.runs.folder import RunFolder
from trainwright.scaling.bottleneck import Bottleneck, MeasuredCount, bottleneck
from trainwright.scaling.cases import Case, Mode, Refused, cases
from trainwright.scaling.counts import AvailableDevices, counts_of, require_available, usual_counts
from trainwright.scaling.figures import Growth, ScalingPoint, growth
from trainwright.scaling.trial import Failed, Trial, try_out

DEFAULT_STEPS = 20
DEFAULT_TIMEOUT_S = 600.0
LEAST_GAIN_PCT = 50.0
"""Of the work of one rank at the smallest count: what each added rank has to bring by default."""


@dataclass(frozen=True, kw_only=True)
class ScalingFlags:
    """The flags of the command; `counts` as it is written, `1,2,4,8`, None for the usual ones."""

    counts: str | None
    modes: tuple[Mode, ...]
    steps: int = DEFAULT_STEPS
    timeout_s: float = DEFAULT_TIMEOUT_S
    least_gain_pct: float = LEAST_GAIN_PCT


@dataclass(frozen=True)
class Tried:
    """One case and what came of it."""

    case: Case | Refused
    outcome: Trial | Failed


@dataclass(frozen=True, kw_only=True)
class ScalingCurve:
    """One mode: each count that was measured, why others were not, and what follows; bottlenecks go with `grown`."""

    mode: Mode
    grown: tuple[Growth, ...]
    bottlenecks: tuple[Bottleneck, ...]
    failed: dict[int, str]
    recommended: Choice[int] | None


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """All that was measured of a job on what is here."""

    job: str
    available: AvailableDevices
    asked: ScalingFlags
    tried: tuple[Tried, ...]
    curves: tuple[ScalingCurve, ...]


def scale(loaded: LoadedJob, asked: ScalingFlags, place: Path) -> Scaling:
    """Measure every count in short runs of the job, in a run folder of their own in `place`.

    Raises:
        UserError: counts are not there, the job cannot be run, or no count could be measured.
    """
    job = loaded.job
    named = None if asked.counts is None else counts_of(asked.counts)
    if job.script is not None:
        raise UserError(
            "`scaling` measures the built-in trainer, and this job has a script of its own",
            hints=["run the script on each count and compare what `trainwright watch` shows"],
        )
    require_runnable(job)
    inventory = local_inventory(job.resources.device)
    available = AvailableDevices.of(select_devices(inventory, job.resources.gpus), inventory.host)
    counts = usual_counts(available) if named is None else named
    require_available(counts, available)
    require_train_extra()
    folder = RunFolder(place / job.name)
    folder.create()
    stop = StopAsked()
    with stop.listening():
        tried = [
            _tried(folder, case, available, asked, stop)
            for case in cases(loaded, str(place), inventory, available, counts, asked.modes)
        ]
    if not any(isinstance(one.outcome, Trial) for one in tried):
        why = [
            f"{available.named(one.case.count)}: {one.outcome.why}" for one in tried if isinstance(one.outcome, Failed)
        ]
        raise UserError("no count could be measured", problems=why, exit_code=ExitCode.FAILED)
    curves = tuple(curve(mode, tried, asked.least_gain_pct, available) for mode in asked.modes)
    return Scaling(job=job.name, available=available, asked=asked, tried=tuple(tried), curves=curves)


def curve(mode: Mode, tried: Sequence[Tried], least_gain_pct: float, available: AvailableDevices) -> ScalingCurve:
    """Put together what was found in one mode."""
    of_mode = [one for one in tried if mode in one.case.modes]
    trials = [
        (one.case, one.outcome) for one in of_mode if isinstance(one.case, Case) and isinstance(one.outcome, Trial)
    ]
    grown = growth([_point(case, trial) for case, trial in trials])
    measured = [MeasuredCount(case.plan.layout, trial) for case, trial in trials]
    return ScalingCurve(
        mode=mode,
        grown=tuple(grown),
        bottlenecks=tuple(bottleneck(one, measured[0], mode) for one in measured),
        failed={one.case.count: one.outcome.why for one in of_mode if isinstance(one.outcome, Failed)},
        recommended=recommended(grown, least_gain_pct, available) if grown else None,
    )


def _tried(
    folder: RunFolder, case: Case | Refused, available: AvailableDevices, asked: ScalingFlags, stop: StopAsked
) -> Tried:
    title = f"{available.named(case.count)}, {' and '.join(case.modes)} scaling"
    if isinstance(case, Refused):
        tell(f"{title}: {case.why}")
        return Tried(case, Failed(case.why))
    tell(f"{title}: measuring {asked.steps} steps of {case.plan.layout.global_batch_size} samples")
    outcome = try_out(folder, case, stop, steps=asked.steps, timeout_s=asked.timeout_s)
    if isinstance(outcome, Failed):
        tell(f"{title}: {outcome.why}")
    return Tried(case, outcome)


def _point(case: Case, trial: Trial) -> ScalingPoint:
    estimate = case.plan.estimate
    return ScalingPoint(
        count=case.count,
        global_batch_size=case.plan.layout.global_batch_size,
        trial=trial,
        estimate_s=None if estimate is None or estimate.time is None else estimate.time.step_s,
    )


def recommended(grown: Sequence[Growth], least_gain_pct: float, available: AvailableDevices) -> Choice[int]:
    """Return the last count up to which each added rank brings `least_gain_pct` of one's work, and the figures.

    `grown` ascends. Counts between two that were measured, and beyond the last, are not judged.
    """
    steps = []
    for before, after in pairwise(grown):
        added = after.point.count - before.point.count
        gain_pct = 100 * (after.worth.median - before.worth.median) / added
        least = 100 * (after.worth.low - before.worth.high) / added
        most = 100 * (after.worth.high - before.worth.low) / added
        steps.append(
            f"{before.point.count} to {after.point.count}: each added one brings {gain_pct:.0f} % of one's work"
        )
        open_ = "; within the spread of the steps it could be otherwise" if least < least_gain_pct <= most else ""
        if gain_pct < least_gain_pct:
            rest = f", less than the {least_gain_pct:g} % that are asked for (--min-gain){open_}"
            return Choice(before.point.count, "; ".join(steps) + rest)
        steps[-1] += open_
    last = grown[-1].point.count
    if not steps:
        return Choice(last, f"only {available.named(last)} could be measured, so nothing is said of others")
    paid = f"all bring the {least_gain_pct:g} % that are asked for (--min-gain)"
    return Choice(last, f"{'; '.join(steps)}; {paid}, and more than {available.named(last)} were not measured")
