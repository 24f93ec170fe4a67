"""Throughput, speed-up, efficiency and overhead of each count, from the steps that were measured.

Speed-ups are those of samples a second, so that weak and strong scaling have the same ideal: as many times as fast as
there are times as many ranks. Overhead is 1 - efficiency (S1-29).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from trainwright.scaling.trial import Trial


@dataclass(frozen=True)
class MiddleHalf:
    """The middle half of some figures, and their median."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> MiddleHalf:
        """Return the quartiles; of one figure, that figure."""
        if len(values) == 1:
            return MiddleHalf(values[0], values[0], values[0])
        return MiddleHalf(*quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """What `count` ranks measured in one mode; `estimate_s` is our prediction for a step of the same layout."""

    count: int
    global_batch_size: int
    trial: Trial
    estimate_s: float | None = None

    @property
    def step_s(self) -> MiddleHalf:
        """Seconds of an optimizer step."""
        return MiddleHalf.of(self.trial.step_s)

    @property
    def samples_s(self) -> MiddleHalf:
        """Samples a second; the slow quarter of steps gives the low end."""
        step = self.step_s
        return MiddleHalf(*(self.global_batch_size / seconds for seconds in (step.high, step.median, step.low)))

    @property
    def tokens_s(self) -> MiddleHalf:
        """Tokens a second, without padding."""
        return MiddleHalf.of(self.trial.tokens_per_s)

    @property
    def estimated_samples_s(self) -> float | None:
        """Samples a second by the estimate."""
        return None if self.estimate_s is None else self.global_batch_size / self.estimate_s


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A point against the smallest count that was measured in its mode.

    `worth` is how many ranks' work it does, if each of the smallest count's does one's; the spread is that of its own
    steps. `estimated` is the same of the estimates.
    """

    point: ScalingPoint
    base: int
    worth: MiddleHalf
    estimated: float | None

    @property
    def speed_up(self) -> float:
        """Times as fast as the smallest count."""
        return self.worth.median / self.base

    @property
    def estimated_speed_up(self) -> float | None:
        """The same of the estimates."""
        return None if self.estimated is None else self.estimated / self.base

    @property
    def efficiency_pct(self) -> float:
        """Speed-up over the ideal one."""
        return 100 * self.worth.median / self.point.count

    @property
    def overhead_pct(self) -> float:
        """What is lost of the ideal; negative where it is surpassed."""
        return 100 - self.efficiency_pct


def growth(points: Sequence[ScalingPoint]) -> list[Growth]:
    """Return each point of one mode, ascending, against the first."""
    grown = []
    for point in points:
        first = points[0]
        unit = first.samples_s.median / first.count
        estimated = None
        if first.estimated_samples_s is not None and point.estimated_samples_s is not None:
            estimated = point.estimated_samples_s / first.estimated_samples_s * first.count
        pace = point.samples_s
        worth = MiddleHalf(pace.low / unit, pace.median / unit, pace.high / unit)
        grown.append(Growth(point=point, base=first.count, worth=worth, estimated=estimated))
    return grown
