"""Ranks of different speed: each gets the share of a step that it can do in the time of the others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

from trainwright.job.schedule import apportion
from trainwright.train.cutting.split import Split
from trainwright.train.ranks import Ranks
from trainwright.train.stopwatch import Stopwatch

PERIODS, PERIOD_S = 8, 1.25
"""What is decided rests on so many periods of so many seconds at least, which all have to say the same: ten seconds
in which a rank is slower are a slower device, one second may be another program."""
LEAST_GAIN = 1.1
"""A split is left as it is for less: the figures are no finer, and a change costs a checkpoint."""
LOOK_EVERY_STEPS = 8
WATCH_EVERY_STEPS = 4
"""Once a run has its split, only so many steps are timed."""


@dataclass(frozen=True)
class SplitChange:
    """Another split, the seconds that each rank takes for a token, and how many times as fast a step becomes.

    `steady`: every period says so. Where it is not, another program may be in the way, and time will tell.
    """

    before: Split
    after: Split
    token_s: tuple[float, ...]
    gain: float
    steady: bool

    def __str__(self) -> str:
        fastest = min(self.token_s)
        speeds = ", ".join(f"{fastest / seconds:.0%}" for seconds in self.token_s)
        return (
            f"samples a step on each rank: {_listed(self.before.weights)} -> {_listed(self.after.weights)} "
            f"(measured speeds {speeds}; {self.gain:.2f} times as fast by these figures)"
        )


class Balance:
    """The split in force, and whether another would be faster.

    It changes only together with a checkpoint that holds it, so that what follows a checkpoint is computed by the same
    ranks when it is done again: early in a run that has no measured split yet, and later when a checkpoint is due.
    """

    def __init__(self, split: Split, ranks: Ranks, stopwatch: Stopwatch | None, *, settled: bool) -> None:
        self.split = split
        self._ranks, self._stopwatch = ranks, stopwatch
        self._settled = settled
        self._periods: deque[float] = deque(maxlen=PERIODS)
        self._started_s, self._seconds, self._tokens = time.monotonic(), 0.0, 0

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Time the passes of a step."""
        if self._stopwatch is None or (self._settled and step % WATCH_EVERY_STEPS):
            yield
            return
        with self._stopwatch.running():
            yield

    def note(self, tokens: int) -> None:
        """Note what this rank computed in a step that was timed, padding included."""
        seconds = 0.0 if self._stopwatch is None else self._stopwatch.take_s()
        if not seconds:
            return
        self._seconds, self._tokens = self._seconds + seconds, self._tokens + tokens
        if time.monotonic() - self._started_s >= PERIOD_S:
            self._periods.append(self._seconds / self._tokens)
            self._started_s, self._seconds, self._tokens = time.monotonic(), 0.0, 0

    def look(self, step: int, *, saving: bool) -> SplitChange | None:
        """Take a faster split where there is one and now is the time; every rank calls it after every step.

        `saving`: a checkpoint follows.
        """
        if self._stopwatch is None or not (saving or (not self._settled and step % LOOK_EVERY_STEPS == 0)):
            return None
        periods: list[list[float]] = self._ranks.gather(list(self._periods))
        if min(map(len, periods)) < PERIODS:
            return None
        change = better(self.split, periods)
        self._settled = change is None or change.steady
        if change is None or not change.steady:
            return None
        self.split = change.after
        self._periods.clear()
        return change


def better(split: Split, token_s: Sequence[Sequence[float]]) -> SplitChange | None:
    """Return a split that is faster by LEAST_GAIN, None where there is none.

    `token_s` has the seconds for a token, by rank and period.
    """
    typical = [median(periods) for periods in token_s]
    weights = tuple(apportion(sum(split.weights), [1 / seconds for seconds in typical]))
    gain, *gains = (
        _step_s(split.weights, period) / _step_s(weights, period) for period in (typical, *zip(*token_s, strict=True))
    )
    if gain < LEAST_GAIN:
        return None
    return SplitChange(split, replace(split, weights=weights), tuple(typical), gain, steady=min(gains) >= LEAST_GAIN)


def _step_s(weights: Sequence[int], token_s: Sequence[float]) -> float:
    """Return how long the slowest rank takes, in arbitrary units."""
    return max(weight * seconds for weight, seconds in zip(weights, token_s, strict=True))


def _listed(weights: Sequence[int]) -> str:
    return " + ".join(map(str, weights))
