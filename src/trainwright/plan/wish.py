"""What else is asked of a plan than the job says."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.estimate.calibration import Calibration
from trainwright.estimate.measured_runs import stored_runs
from trainwright.hardware.inventory import Host
from trainwright.job.schema import Job
from trainwright.out_of_memory import expanding_by
from trainwright.plan.confirmed import Tracing
from trainwright.plan.estimates import Amount, samples_in
from trainwright.plan.layout import Layout
from trainwright.plan.options import lacking
from trainwright.plan.search import Goal
from trainwright.plan.tuned import Tuned, stored_answers

NOT_KNOWN_AMOUNT = Amount()
NOT_KNOWN_HOST = Host()
NO_RUNS = Calibration(())


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What else is asked of a plan than the job says.

    `host` is that of each node, `calibration` what earlier runs measured. `may_leave_idle`: layouts on fewer devices
    are looked at too, and taken where the run is faster by some margin; with `idle_by_goal` the goal alone decides.
    `must_fit`: refuse where nothing fits, with what would; otherwise the least that is too big is planned, with a
    warning. `keep` is the layout of an earlier attempt, which is taken again where it still fits. `tuned` are the
    answers of `trainwright tune`: what was measured comes before what is estimated. `lacks` are the strategies whose
    library is not there: they are taken only where nothing else fits. With `tracing` the chosen layout is one that a
    traced step allows, where a step of it can be traced; `keep` is not traced again.
    """

    goal: Goal = "soonest"
    amount: Amount = NOT_KNOWN_AMOUNT
    host: Host = NOT_KNOWN_HOST
    calibration: Calibration = NO_RUNS
    may_leave_idle: bool = False
    idle_by_goal: bool = False
    must_fit: bool = False
    keep: Layout | None = None
    tuned: tuple[Tuned, ...] = ()
    lacks: tuple[str, ...] = ()
    tracing: Tracing | None = None
    expanding_by: str | None = None
    """The environment variable that lets segments of torch's allocator expand where the ranks will run."""

    @classmethod
    def of(
        cls,
        job: Job,
        host: Host,
        *,
        runs_here: bool,
        may_leave_idle: bool,
        goal: Goal = "soonest",
        samples: int | None = None,
        tokens_per_sample: int | None = None,
        must_fit: bool = False,
        keep: Layout | None = None,
        tracing: Tracing | None = None,
    ) -> Wish:
        """Return the wish for a job: what is asked, and all that this machine knows besides.

        `runs_here`: the devices are of this machine, whose libraries the run will have; others, that are only written
        down, are what could be asked for, and each that is left out is saved. `samples` are counted in the job's data
        where they are not given.
        """
        return cls(
            goal=goal,
            amount=Amount(samples or samples_in(job), tokens_per_sample),
            host=host,
            calibration=Calibration(stored_runs()),
            may_leave_idle=may_leave_idle,
            idle_by_goal=not runs_here or goal in ("cheapest", "fewest-gpus"),
            must_fit=must_fit,
            keep=keep,
            tuned=stored_answers(),
            lacks=lacking() if runs_here else (),
            tracing=tracing,
            expanding_by=expanding_by(),
        )
