"""Whether the loss rises by more than its own scatter: its level over some steps, compared with what it was before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import sqrt
from statistics import median
from typing import Any, Final

from trainwright.job.schema import AlertsSection
from trainwright.watch.alerts.conditions import Condition, above

LEVEL_STEPS: Final = 50
"""The level of the loss is the median of so many steps: some that leap do not move it."""
SCATTERS: Final = 8.0
"""A rise counts from so many scatters of the level; in a day of steps chance alone brings five."""
FLOOR_PCT: Final = 5.0
"""A rise counts from this share of the run's first level, however small the loss has become."""
RECOVERED: Final = 1.5
"""A rise counts from so many times the largest from which the loss has come back by itself."""
LASTING_LEVELS: Final = 2
PATIENT_LEVELS: Final = 20
"""How many levels a rise has to last where no learning rate is told: it may be a restart of the learning rate."""
SETTLING_LEVELS: Final = 4
"""How many levels the loss has to settle, at the beginning and after a rise of the learning rate."""
KNOWN_LEVELS: Final = 100
RATE_RISE: Final = 1.01
_SIGMA: Final = 1.4826
"""Standard deviation of a normal distribution over the median of its absolute deviations."""
_MEDIAN_ERROR: Final = 1.2533
"""Standard error of a median over that of a mean, for a normal distribution: the root of pi/2."""


class LossLevel:
    """The loss of a run over time, of which `add` takes each training record.

    A rise is measured from two levels: that of the run's first steps, above which no healthy run goes, and the lowest
    since the learning rate last rose, as a restart of the learning rate raises the loss and nothing is wrong.
    """

    def __init__(self, earlier: Iterable[Mapping[str, Any]] = ()) -> None:
        """Begin an attempt; `earlier` are the records of those before it, which hold the run's first losses."""
        before = (loss for record in earlier if (loss := _loss(record)) is not None)
        self._first = list(islice(before, LEVEL_STEPS))
        self._losses: list[float] = []
        self._levels: deque[float] = deque(maxlen=KNOWN_LEVELS)
        self._changes: deque[float] = deque(maxlen=KNOWN_LEVELS)
        self._within: deque[float] = deque(maxlen=KNOWN_LEVELS)
        self._scatter = 0.0
        self._rates: deque[float] = deque(maxlen=LEVEL_STEPS)
        self._settled = 0
        self._lowest: float | None = None
        self._rise = self._recovered = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        """Take one record of a step in."""
        rate, loss = record.get("learning_rate"), _loss(record)
        if isinstance(rate, int | float):
            self._rates.append(rate)
            if rate > RATE_RISE * self._rates[0]:
                self._settled, self._lowest, self._rise = 0, None, 0.0
        if loss is None:
            return
        if len(self._first) < LEVEL_STEPS:
            self._first.append(loss)
        self._losses.append(loss)
        if len(self._losses) == LEVEL_STEPS:
            self._take_level(self._losses)
            self._losses = []

    def _take_level(self, losses: list[float]) -> None:
        level = median(losses)
        if self._levels:
            self._changes.append(level - self._levels[-1])
        self._levels.append(level)
        self._within.append(_scatter_of(losses))
        # Of the level, from step to step within it and from one to the next: the second is the larger where what is
        # learned changes slowly, and leaves a steady fall out.
        chance = _MEDIAN_ERROR * median(self._within) / sqrt(LEVEL_STEPS)
        self._scatter = max(chance, _scatter_of(self._changes) / sqrt(2))
        self._settled += 1
        if self._settled < SETTLING_LEVELS:
            return
        self._lowest = level if self._lowest is None else min(self._lowest, level)
        self._rise = max(self._rise, level - self._lowest)
        if level - self._lowest <= self._least_room():
            self._recovered, self._rise = max(self._recovered, self._rise), 0.0

    def _least_room(self) -> float:
        return max(SCATTERS * self._scatter, abs(median(self._first)) * FLOOR_PCT / 100)

    def conditions(self, limits: AlertsSection) -> Iterator[Condition]:
        """Yield whether the loss rises, once there is something to compare it with."""
        if len(self._levels) < SETTLING_LEVELS:
            return
        compared = [(median(self._first), LASTING_LEVELS)]
        if self._lowest is not None and self._rates:
            compared.append((self._lowest, LASTING_LEVELS))
        elif self._lowest is not None and not self._falls():
            compared.append((self._lowest, PATIENT_LEVELS))
        judged = [self._judged(base, levels, limits.loss_rise_max_pct) for base, levels in compared]
        lasting, base, room = max(judged, key=lambda one: one[0] - one[1] - one[2])
        yield above(
            lasting,
            base + room,
            margin=room / 2,
            name="loss",
            rule="loss_rising",
            subject="loss",
            what=f"the loss rises: {self._levels[-1]:.4g} over the last {LEVEL_STEPS} steps, and it was {base:.4g}",
            advice="a lower train.learning_rate, more train.warmup_steps, or damaged data since then",
        )

    def _falls(self) -> bool:
        recent = islice(reversed(self._levels), PATIENT_LEVELS)
        return self._levels[-1] < max(recent) - SCATTERS / 2 * self._scatter

    def _judged(self, base: float, levels: int, rise_pct: float) -> tuple[float, float, float]:
        """Return what the loss has not been below for so many levels, with the base and the room above it."""
        room = max(abs(base) * rise_pct / 100, self._least_room(), RECOVERED * self._recovered)
        return min(islice(reversed(self._levels), levels)), base, room


def _loss(record: Mapping[str, Any]) -> float | None:
    loss = record.get("loss") if record.get("kind") == "train" else None
    return loss if isinstance(loss, int | float) else None


def _scatter_of(values: Iterable[float]) -> float:
    known = list(values)
    if not known:
        return 0.0
    middle = median(known)
    return _SIGMA * median(abs(value - middle) for value in known)
