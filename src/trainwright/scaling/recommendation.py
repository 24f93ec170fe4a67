"""The count where one more GPU stops paying, by a rule that is printed with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from trainwright.hardware.choice import Choice
from trainwright.scaling.counts import There
from trainwright.scaling.figures import Growth

LEAST_GAIN_PCT = 50.0
"""Of the work of one rank at the smallest count: what each added rank has to bring by default."""


def recommended(grown: Sequence[Growth], least_gain_pct: float, there: There) -> Choice[int]:
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
        return Choice(last, f"only {there.named(last)} could be measured, so nothing is said of others")
    paid = f"all bring the {least_gain_pct:g} % that are asked for (--min-gain)"
    return Choice(last, f"{'; '.join(steps)}; {paid}, and more than {there.named(last)} were not measured")
