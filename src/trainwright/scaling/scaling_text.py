"""What `scaling` prints: a table for each mode, where the time goes, the bottleneck and the count that pays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from trainwright.hardware.reading import printable
from trainwright.launch.hangs.rank_sections import STEP_SECTIONS
from trainwright.scaling.bottleneck import Bottleneck
from trainwright.scaling.cases import Case, Mode
from trainwright.scaling.claims import CLAIMS, SAID_OF, SpeedupClaim
from trainwright.scaling.figures import Growth
from trainwright.scaling.scaling_run import Scaling, ScalingCurve, Tried
from trainwright.scaling.trial import WARM_UP_STEPS, Trial
from trainwright.watch.tables import Table

KEPT = {
    "weak": "weak scaling: each rank's batch stays, the global batch grows",
    "strong": "strong scaling: the job's global batch stays",
}
OTHERS_USE = 0.1
"""Share of a full machine's cores that other programs may have before it is said."""


def explain(scaling: Scaling) -> list[str]:
    """Return the whole text; every figure is measured unless its column or line says estimate or claim."""
    lines = [
        printable(f"{scaling.job} on {scaling.available}"),
        f"Measured: {scaling.asked.steps} steps or more after {WARM_UP_STEPS} of warm-up; their median and middle half",
    ]
    for curve in scaling.curves:
        lines += ["", *_curve(scaling, curve)]
    lines += ["", *_notes(scaling)]
    return [printable(line) for line in lines]


def to_json(scaling: Scaling) -> dict[str, Any]:
    """Return plain data; `measured`, `estimate` and `claim` hold figures of that kind and no other."""
    return {
        "schema_version": 1,
        "job": scaling.job,
        "device": scaling.available.kind,
        "there": scaling.available.most,
        "rule": {
            "steps": scaling.asked.steps,
            "warm_up_steps": WARM_UP_STEPS,
            "min_gain_pct": scaling.asked.least_gain_pct,
        },
        "runs": [_run_as_data(one) for one in scaling.tried],
        "curves": {curve.mode: _curve_as_data(curve) for curve in scaling.curves},
    }


def claim_beside(grown: Growth) -> SpeedupClaim | None:
    """Return the guide's claim for a count, which is against one GPU: None where the measured one is not."""
    return CLAIMS.get(grown.point.count) if grown.base == 1 else None


def _curve(scaling: Scaling, curve: ScalingCurve) -> Iterator[str]:
    noun, named = f"{scaling.available.noun}s", scaling.available.named
    yield KEPT[curve.mode].capitalize()
    for heading, columns, rows in _tables(scaling, curve):
        yield from [f"  {heading}"] if heading else []
        yield from (f"  {line}" for line in Table("", (noun, *columns), tuple(rows)).lines())
    if curve.grown and curve.grown[0].base > 1:
        yield f"  speed-up is against {named(curve.grown[0].base)}, the fewest that were measured"
    yield from (f"  {named(count)}: not measured: {why}" for count, why in curve.failed.items())
    for grown, held in zip(curve.grown, curve.bottlenecks, strict=True):
        yield f"  bottleneck of {named(grown.point.count)}: {held.kind} ({held.figures})"
    if curve.recommended is not None:
        yield f"  recommended: {named(curve.recommended.value)} ({curve.recommended.reason})"


Row = tuple[str, ...]


def _tables(scaling: Scaling, curve: ScalingCurve) -> Iterator[tuple[str, Row, list[Row]]]:
    """Yield (heading, columns, rows) of those that have rows, each narrow enough for a terminal of 80 columns."""
    tables: tuple[tuple[str, Row, list[Row]], ...] = (
        ("", _MEASURED, [_measured(scaling, curve.mode, grown) for grown in curve.grown]),
        ("against the claims of a guide", _CLAIMED, [_claimed(grown) for grown in curve.grown]),
        ("against the estimate", _ESTIMATED, [row for grown in curve.grown if (row := _estimated(grown))]),
        ("milliseconds of a step by section, mean over ranks (measured)", STEP_SECTIONS, _sections(curve)),
    )
    yield from (table for table in tables if table[2])


_MEASURED = ("layout", "batch", "step s", "samples/s", "tokens/s", "speed-up", "efficiency")
_CLAIMED = ("step s, middle half", "overhead", "overhead (claim)", "speed-up (claim)")
_ESTIMATED = ("step s", "step s (estimate)", "speed-up", "speed-up (estimate)")


def _measured(scaling: Scaling, mode: Mode, grown: Growth) -> Row:
    point, layout = grown.point, _case(scaling, mode, grown.point.count).plan.layout
    return (
        str(point.count),
        f"{layout.strategy} {layout.micro_batch_size} x {layout.gradient_accumulation_steps}",
        str(point.global_batch_size),
        f"{point.step_s.median:.4g}",
        f"{point.samples_s.median:,.4g}",
        f"{point.tokens_s.median:,.0f}",
        f"{grown.speed_up:.2f}x",
        f"{grown.efficiency_pct:.0f} %",
    )


def _claimed(grown: Growth) -> Row:
    step_s, claim = grown.point.step_s, claim_beside(grown)
    return (
        str(grown.point.count),
        f"{step_s.low:.4g} to {step_s.high:.4g}",
        f"{grown.overhead_pct:.0f} %",
        "n/a" if claim is None else f"{_range(claim.overhead_pct, 'g')} %",
        "n/a" if claim is None else f"{_range(claim.speed_up, '.1f')}x",
    )


def _estimated(grown: Growth) -> Row | None:
    speed, step_s = grown.estimated_speed_up, grown.point.estimate_s
    if speed is None or step_s is None:
        return None
    count, measured_s = str(grown.point.count), f"{grown.point.step_s.median:.4g}"
    return count, measured_s, f"{step_s:.4g}", f"{grown.speed_up:.2f}x", f"{speed:.2f}x"


def _case(scaling: Scaling, mode: Mode, count: int) -> Case:
    cases = (one.case for one in scaling.tried if isinstance(one.case, Case))
    return next(case for case in cases if case.count == count and mode in case.modes)


def _sections(curve: ScalingCurve) -> list[Row]:
    rows = []
    for grown in curve.grown:
        means = _mean_sections_s(grown.point.trial)
        if means:
            rows.append((str(grown.point.count), *(f"{1000 * means[name]:,.1f}" for name in STEP_SECTIONS)))
    return rows


def _mean_sections_s(trial: Trial) -> dict[str, float]:
    ranks = trial.sections_s
    return {name: sum(rank[name] for rank in ranks) / len(ranks) for name in STEP_SECTIONS} if ranks else {}


def _notes(scaling: Scaling) -> Iterator[str]:
    yield f"Claimed by a guide, not measured here: {SAID_OF}"
    if any(grown.point.estimate_s is not None for curve in scaling.curves for grown in curve.grown):
        yield "Estimates are those of `trainwright plan`, for samples of data.max_length tokens"
    reasons = {reason for one in scaling.tried if (reason := _no_estimate(one)) is not None}
    yield from (f"Not estimated: {reason}" for reason in sorted(reasons))
    for one in scaling.tried:
        use = one.outcome.cores if isinstance(one.outcome, Trial) else None
        if use is not None and use.machine_is_full and use.busy - use.used > OTHERS_USE * use.machine:
            yield (
                f"warning: while {scaling.available.named(one.case.count)} ({' and '.join(one.case.modes)}) worked, "
                f"other programs kept {use.busy - use.used:.1f} of {use.machine} cores busy, and all were: "
                "the figures are a busy machine's"
            )


def _no_estimate(one: Tried) -> str | None:
    if not isinstance(one.case, Case):
        return None
    estimate = one.case.plan.estimate
    return one.case.plan.no_estimate if estimate is None else estimate.no_time


def _range(ends: tuple[float, float], spec: str) -> str:
    low, high = (f"{end:{spec}}" for end in ends)
    return low if low == high else f"{low}-{high}"


def _run_as_data(one: Tried) -> dict[str, Any]:
    case, outcome = one.case, one.outcome
    data: dict[str, Any] = {"count": case.count, "modes": list(case.modes)}
    if isinstance(case, Case):
        data |= {
            "layout": dataclasses.asdict(case.plan.layout),
            "estimate": None if case.plan.estimate is None else case.plan.estimate.to_json(),
            "no_estimate": _no_estimate(one),
        }
    if not isinstance(outcome, Trial):
        return data | {"measured": None, "why_not": outcome.why}
    measured = {
        "step_s": list(outcome.step_s),
        "tokens_per_s": list(outcome.tokens_per_s),
        "sections_s_by_rank": [dict(rank) for rank in outcome.sections_s],
        "cores": None if outcome.cores is None else vars(outcome.cores),
    }
    return data | {"measured": measured, "why_not": None}


def _curve_as_data(curve: ScalingCurve) -> dict[str, Any]:
    points = [_point_as_data(grown, held) for grown, held in zip(curve.grown, curve.bottlenecks, strict=True)]
    chosen = curve.recommended
    return {
        "points": points,
        "not_measured": {str(count): why for count, why in curve.failed.items()},
        "recommended": None if chosen is None else {"count": chosen.value, "reason": chosen.reason},
    }


def _point_as_data(grown: Growth, held: Bottleneck) -> dict[str, Any]:
    point, claim = grown.point, claim_beside(grown)
    return {
        "count": point.count,
        "against": grown.base,
        "global_batch_size": point.global_batch_size,
        "measured": {
            "step_s": vars(point.step_s),
            "samples_per_s": vars(point.samples_s),
            "tokens_per_s": vars(point.tokens_s),
            "speed_up": grown.speed_up,
            "efficiency_pct": grown.efficiency_pct,
            "overhead_pct": grown.overhead_pct,
            "sections_s": _mean_sections_s(point.trial),
        },
        "estimate": {"step_s": point.estimate_s, "speed_up": grown.estimated_speed_up},
        "claim": None if claim is None else vars(claim),
        "bottleneck": {"kind": held.kind, "figures": held.figures},
    }
