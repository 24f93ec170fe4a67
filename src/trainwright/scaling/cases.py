"""What is to be measured: for each count the job with the batch of weak and of strong scaling, planned as `train` does.

Weak: each rank's micro-batch and accumulation stay, the global batch grows. Strong: the job's global batch stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from trainwright.errors import UserError
from trainwright.hardware.inventory import Inventory
from trainwright.job.loading import LoadedJob
from trainwright.job.schema import AlertsSection, Interval, Job
from trainwright.launch.planning import given_keys
from trainwright.launch.train_run import plan_on
from trainwright.plan.choose import Plan
from trainwright.scaling.counts import AvailableDevices

Mode = Literal["weak", "strong"]
MODES: tuple[Mode, ...] = get_args(Mode)

NEVER = 1_000_000
"""Steps; a trial is ended long before."""
_BATCH = ("train.global_batch_size", "train.micro_batch_size", "train.gradient_accumulation_steps")


@dataclass(frozen=True, kw_only=True)
class Case:
    """The job as it runs on `count` ranks, a point of each of `modes`."""

    count: int
    modes: tuple[Mode, ...]
    job: Job
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A count that no layout was found for, and why."""

    count: int
    modes: tuple[Mode, ...]
    why: str


def cases(
    loaded: LoadedJob,
    output_dir: str,
    inventory: Inventory,
    available: AvailableDevices,
    counts: Sequence[int],
    modes: Sequence[Mode],
) -> list[Case | Refused]:
    """Return a case for each count and mode, by count; one that is a point of both modes once.

    The work of a rank under weak scaling is that of the smallest count that can be planned.

    Raises:
        UserError: no count can be planned.
    """
    planner = _Planner(loaded, output_dir, inventory, available)
    planned: list[Case | Refused] = []
    base: Case | None = None
    for count in counts:
        if base is None:
            first = planner.as_written(count, tuple(modes))
            planned.append(first)
            base = first if isinstance(first, Case) else None
        else:
            planned += [planner.like(base, count, mode) for mode in modes]
    if base is None:
        refused = [f"{available.named(case.count)}: {case.why}" for case in planned if isinstance(case, Refused)]
        raise UserError("no count can be planned", problems=refused)
    return planned


@dataclass(frozen=True)
class _Planner:
    loaded: LoadedJob
    output_dir: str
    inventory: Inventory
    available: AvailableDevices

    def as_written(self, count: int, modes: tuple[Mode, ...]) -> Case | Refused:
        """Plan the job with the global batch that it says, or that its micro-batch and accumulation make on `count`."""
        batch = {"gradient_accumulation_steps": "auto"} if _BATCH[0] in self._given() else {}
        return self._planned(count, modes, batch, ())

    def like(self, base: Case, count: int, mode: Mode) -> Case | Refused:
        """Plan another count with the global batch of `base`, or with the work of each of its ranks."""
        layout = base.plan.layout
        total = layout.global_batch_size
        if mode == "strong":
            batch: dict[str, Any] = {"global_batch_size": total, "gradient_accumulation_steps": "auto"}
            return self._planned(count, (mode,), batch, _BATCH[:1])
        if total * count % base.count:
            on_base = self.available.named(base.count)
            why = f"{total} samples over {on_base} are {total * count / base.count:g} over {count}"
            return Refused(count=count, modes=(mode,), why=f"{why}: no whole number")
        batch = {
            "global_batch_size": total * count // base.count,
            "micro_batch_size": layout.micro_batch_size,
            "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        }
        return self._planned(count, (mode,), batch, _BATCH)

    def _planned(
        self, count: int, modes: tuple[Mode, ...], batch: dict[str, Any], also_given: Iterable[str]
    ) -> Case | Refused:
        asked = _as_trial(self.loaded.job, self.output_dir, count, batch)
        given = {*self._given(), *also_given}
        try:
            job, plan = plan_on(asked, given, self.inventory, self.available.first(count), may_leave_idle=False)
        except UserError as error:
            return Refused(count=count, modes=modes, why="; ".join((error.message, *error.problems)))
        return Case(count=count, modes=modes, job=job, plan=replace(plan, ranked=()))

    def _given(self) -> set[str]:
        return given_keys(self.loaded)


def _as_trial(job: Job, output_dir: str, count: int, batch: dict[str, Any]) -> Job:
    """Return the job as a trial runs it: the same step, and nothing between steps that only a whole run needs.

    Batches are whole, as a smaller one at the end of an epoch would pass for a faster step. Alerts reach nobody.
    """
    never = Interval(value=NEVER, unit="step")
    alone = count == 1 and job.resources.strategy in ("ddp", "fsdp2")  # these share work, and there is nobody to
    whole = {"max_steps": NEVER, "drop_last": True, "logging_steps": NEVER}
    return job.model_copy(
        update={
            "output_dir": output_dir,
            "train": job.train.model_copy(update=whole | batch),
            "eval": job.eval.model_copy(update={"every": never}),
            "checkpoint": job.checkpoint.model_copy(update={"every": never}),
            "resources": job.resources.model_copy(update={"ranks": count} | ({"strategy": "auto"} if alone else {})),
            "alerts": AlertsSection(),
            "tracking": [],
        }
    )
