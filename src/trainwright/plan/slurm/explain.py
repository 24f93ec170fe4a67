"""What `plan --slurm` prints: the requests by finish time with the reason of each, the strategies, what to ask for."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.hardware.slurm.cluster_text import table
from trainwright.job.schema import Job
from trainwright.plan.explain import claims, seconds, short_strategy
from trainwright.plan.slurm.planned import PlannedRequest
from trainwright.plan.slurm.ranking import Ranked, SlurmPlan, step_s

NOW_S = 60
"""A wait up to this is told as none: the scheduler itself takes as long."""
MOST_ROWS = 12
GUIDES_RULE = (
    "queue no problem: 4x A100; want to start fast: 2x A100; balance: 3x A100; only V100: 4x V100 with ZeRO-3; "
    "perhaps mixed: flexible, expect slow"
)
"""S0-23; the order above is this cluster's answer to the same question."""


def explain_requests(job: Job, plan: SlurmPlan) -> list[str]:
    """Return the whole text; waits are Slurm's word, runs are estimates, what guides say is marked as claimed."""
    sections = (
        _ranking(job, plan),
        _reasons(plan),
        _strategies(plan),
        _asking(plan.best),
        _left_out(plan),
        plan.notes,
        claims(job),
    )
    lines: list[str] = []
    for section in sections:
        found = list(section)
        if found:
            lines += ["", *found] if lines else found
    return lines


def _ranking(job: Job, plan: SlurmPlan) -> Iterator[str]:
    unknown = plan.best.planned.plan.not_known
    if unknown is not None:
        yield unknown
    yield f"Which request has {job.name} soonest, on the Slurm cluster {plan.cluster} ({plan.version})"
    yield "  wait: what Slurm says now, at the latest about; run: an estimate; finish: both together"
    rows: list[tuple[str, ...]] = [("", "FINISH", "WAIT", "RUN", "PARTITION", "REQUEST", "GPUS", "STRATEGY", "BATCH")]
    rows += [_row(number, ranked) for number, ranked in enumerate(plan.ranked[:MOST_ROWS], start=1)]
    yield from table(rows, "  ")
    if len(plan.ranked) > MOST_ROWS:
        yield f"  and {len(plan.ranked) - MOST_ROWS} more: --json has them all"


def _row(number: int, ranked: Ranked) -> tuple[str, ...]:
    planned = ranked.planned
    layout = planned.plan.layout
    return (
        str(number),
        "not known" if ranked.finish_s is None else seconds(ranked.finish_s),
        _wait_text(ranked),
        _run_text(planned),
        planned.request.partition,
        str(planned.shape),
        f"{planned.shape.gpus} of any type" if planned.shape.is_flexible else planned.gpus,
        f"{short_strategy(layout)} {layout.precision}",
        f"{layout.micro_batch_size} x {layout.gradient_accumulation_steps} x {layout.ranks}",
    )


def _reasons(plan: SlurmPlan) -> Iterator[str]:
    yield "Why in this order"
    if plan.best.planned.run is None:
        why = _no_run(plan.best.planned)
        yield f"  the run's length is not known ({why}): by the wait, then by the time of a step"
    for number, ranked in enumerate(plan.ranked[:MOST_ROWS], start=1):
        yield f"  {number}  {'; '.join(_reason(ranked, plan.best))}"


def _reason(ranked: Ranked, best: Ranked) -> Iterator[str]:
    """Yield when and where it starts, how it compares with the best, and what is uncertain about it."""
    planned, wait = ranked.planned, ranked.wait
    when = "start not known" if wait.wait_s is None else f"starts {_start_text(wait.wait_s)}"
    where = f" on {wait.nodes}" if wait.nodes else ""
    yield when + where + (f" ({wait.reason})" if wait.wait_s is None or wait.wait_s != wait.told_s else "")
    if ranked is not best and planned.run is not None and best.planned.run is not None:
        yield from _against(ranked, best)
    if planned.shape.is_flexible:
        yield f"may bring {planned.gpus}" + _spread(planned)
    if planned.shape.nodes > 1:
        yield "the run assumes a fast network between the nodes"
    if planned.jobs > 1:
        yield f"longer than the partition allows: {planned.jobs} jobs, and each further one waits anew"


def _spread(planned: PlannedRequest) -> str:
    """Return what the run takes with the best and the worst that a request of any type may bring."""
    if planned.run is None or planned.fastest is None:
        return ""
    return f": {seconds(planned.fastest.run_s)} to {seconds(planned.run.run_s)}, and the longest is counted"


def _against(ranked: Ranked, best: Ranked) -> Iterator[str]:
    """Yield how wait and run differ from the best's, where it is worth a word."""
    assert ranked.planned.run is not None
    assert best.planned.run is not None
    runs = ranked.planned.run.run_s - best.planned.run.run_s
    waits = (ranked.wait.wait_s or 0.0) - (best.wait.wait_s or 0.0)
    differences = [
        f"{what} {seconds(abs(difference))} {'longer' if difference > 0 else 'less'}"
        for what, difference in (("waits", waits), ("runs", runs))
        if abs(difference) > NOW_S
    ]
    if differences:
        yield f"{' and '.join(differences)} than the first"
    else:
        yield "about as soon as the first, which takes fewer GPUs or nodes"


def _strategies(plan: SlurmPlan) -> Iterator[str]:
    yield "The four strategies of the FramerTurbo guide, here"
    for followed in plan.strategies():
        strategy, ranked = followed.strategy, followed.ranked
        if ranked is None:
            yield f"  {strategy.name}: {followed.why_not}"
        else:
            place = plan.ranked.index(ranked) + 1
            finish = "finish not known" if ranked.finish_s is None else f"finished in {seconds(ranked.finish_s)}"
            yield (
                f"  {strategy.name}: --gres={ranked.planned.request.gres}, wait {_wait_text(ranked)}, "
                f"run {_run_text(ranked.planned)}, {finish} (number {place})"
            )
        yield f"    the guide claims: {strategy.claim}"
    yield f"  the guide's rule: {GUIDES_RULE}"


def _asking(best: Ranked) -> Iterator[str]:
    yield "Ask for it with"
    yield f"  sbatch {' '.join(best.planned.request.options())} ..."
    for name, choice in sorted(best.planned.choices.items()):
        yield f"    {name}: {choice.reason}"


def _left_out(plan: SlurmPlan) -> Iterator[str]:
    """Yield what is not in the ranking, with the reason."""
    if plan.not_asked:
        yield "Not asked about, as the run alone takes no less than the first's wait and run"
        yield from (f"  {made.shape} in {made.request.partition}: run {_run_text(made)}" for made in plan.not_asked)
    if plan.refused:
        yield "Slurm refuses"
        yield from (
            f"  {each.planned.shape} in {each.planned.request.partition}: {each.wait.refused}" for each in plan.refused
        )
    if plan.impossible:
        yield "Does not run on"
        yield from (f"  {each.shape} in {each.shape.partition.name}: {each.why}" for each in plan.impossible)


def _start_text(wait_s: float) -> str:
    return "now" if wait_s <= NOW_S else f"in {seconds(wait_s)}"


def _wait_text(ranked: Ranked) -> str:
    wait_s = ranked.wait.wait_s
    return "not known" if wait_s is None else "none" if wait_s <= NOW_S else seconds(wait_s)


def _run_text(planned: PlannedRequest) -> str:
    if planned.run is not None:
        return seconds(planned.run.run_s)
    return "not known" if math.isinf(step_s(planned)) else f"{seconds(step_s(planned))} a step"


def _no_run(planned: PlannedRequest) -> str:
    estimate = planned.plan.estimate
    if estimate is None:
        return planned.plan.no_estimate or "the model is not known"
    return estimate.no_time or "the number of samples is not known: --samples N"
