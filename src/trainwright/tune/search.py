"""Which micro-batches to try next, from what is known of those that were tried: no more probes than that needs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.plan.search import SAME_TIME
from trainwright.plan.tuned import MeasuredMicroBatch

RUNGS = 4
"""Micro-batches that one probe climbs."""
MOST_PROBES, MOST_SCRIPT_PROBES = 4, 6
"""A script is started anew for every micro-batch, so its search takes more of them."""
ENOUGH_PROBES = 3
"""Beyond so many none is made to find what is faster yet."""
ROUNDS = 4
"""Turns that each of the fastest has in one probe, where the times of steps differ."""
MOST_LOST = 2
"""Probes that may end without an answer, killed or hung, before the search ends with what it knows."""
GROWTH = (4, 8)
"""Where memory is not known, a batch grows by so many samples at a time (S2-32)."""
SHARES = (0.70, 0.85, 0.90)
"""Uses of memory that the levels are near (S2-07, S2-16)."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One micro-batch that ran: seconds of a pass, and those that a step takes once; None where not measured.

    They are the best of `rounds` turns of one process, which others may have had between them.
    """

    micro_batch_size: int
    needed_bytes: int | None = None
    capacity_bytes: int | None = None
    pass_s: float | None = None
    once_s: float = 0.0
    rounds: int = 1
    spread: float = 0.0
    """By how much the middle one of its steps took longer than the shortest."""

    def step_s(self, passes: int) -> float | None:
        """Return the seconds of an optimizer step of so many passes."""
        return None if self.pass_s is None else passes * self.pass_s + self.once_s


@dataclass(frozen=True, kw_only=True)
class ProbeOutcome:
    """What a probe found: the micro-batches that ran; the one that did not (`too_large`), and why.

    `lost_at` is the one that was under way in a probe that was killed or hung, which says nothing of it.
    """

    rungs: tuple[Rung, ...] = ()
    too_large: int | None = None
    lost_at: int | None = None
    why: str | None = None
    evaluated: tuple[int, ...] = ()
    evaluation_too_large: int | None = None
    steps: int = 0


class ProbeSearch:
    """What is known of the micro-batches `sizes` (rising), and what to probe next, `at_once` of them in one probe.

    Peak memory is affine in the micro-batch, or bends upwards where another phase of the step takes over: what two
    measured points say does not fit does not, and what they say fits is tried.
    """

    def __init__(self, sizes: Sequence[int], predicted: int, share: int, *, at_once: int = RUNGS) -> None:
        self.sizes, self._share, self._at_once = tuple(sizes), share, at_once
        self._predicted = max(size for size in self.sizes if size <= max(predicted, self.sizes[0]))
        self.rungs: dict[int, Rung] = {}
        self.too_large: int | None = None
        self.why: str | None = None
        self.evaluated: int | None = None
        self.evaluation_too_large: int | None = None
        self.probes = self.steps = self.lost = 0
        self._lost_at: Counter[int] = Counter()
        self._spread = 0.0
        """By how much the times of one micro-batch have differed at most, in a probe or from one to the next."""

    def take(self, outcome: ProbeOutcome) -> None:
        """Learn from a probe."""
        self.steps += outcome.steps
        for rung in outcome.rungs:
            self._spread = max(self._spread, rung.spread, self._differs(rung))
            self.rungs[rung.micro_batch_size] = rung
        self.evaluated = max((*outcome.evaluated, self.evaluated or 0)) or None
        if outcome.evaluation_too_large is not None:
            self.evaluation_too_large = outcome.evaluation_too_large
        if outcome.lost_at is None:
            self.probes += 1
            self._limit(outcome.too_large, outcome.why)
            return
        self.lost += 1
        self._lost_at[outcome.lost_at] += 1
        if self._lost_at[outcome.lost_at] > 1:
            self._limit(outcome.lost_at, f"{outcome.why}, twice")

    def _differs(self, rung: Rung) -> float:
        """Return how far a time is from that of the same micro-batch before, as a share of the shorter."""
        before, passes = self.rungs.get(rung.micro_batch_size), self._passes(rung.micro_batch_size)
        times = sorted(s for one in (before, rung) if one is not None and (s := one.step_s(passes)) is not None)
        return times[-1] / times[0] - 1 if len(times) == 2 else 0.0

    def _limit(self, size: int | None, why: str | None) -> None:
        if size is not None and (self.too_large is None or size < self.too_large):
            self.too_large, self.why = size, why

    @property
    def largest(self) -> int | None:
        """The largest micro-batch that ran, None before one did."""
        return max(self.rungs, default=None)

    @property
    def is_hopeless(self) -> bool:
        """Whether not even the smallest runs."""
        return self.too_large == self.sizes[0]

    def next_sizes(self) -> tuple[int, ...]:
        """Return the micro-batches of the next probe; none where everything is known, or enough was tried.

        They rise, or take turns.
        """
        most = MOST_PROBES if self._at_once > 1 else MOST_SCRIPT_PROBES
        if self.probes >= most or self.lost > MOST_LOST or self.is_hopeless:
            return ()
        if self.largest is None and self.too_large is None:
            return self._first()
        return self._beside_the_fastest(self._towards_the_edge() or self._towards_the_fastest()) or self._in_turn()

    def needed_bytes(self, size: int) -> float | None:
        """Return the memory that a micro-batch is to be expected to need, None where too little is known."""
        known = [(m, rung.needed_bytes) for m, rung in sorted(self.rungs.items()) if rung.needed_bytes is not None]
        if len(known) < 2:
            return None
        (m1, low), (m2, high) = known[-2:]
        return high + max(0.0, (high - low) / (m2 - m1)) * (size - m2)

    def points(self) -> tuple[MeasuredMicroBatch, ...]:
        """Return every micro-batch that ran with its measured figures."""
        return tuple(
            MeasuredMicroBatch(
                micro_batch_size=size,
                needed_bytes=rung.needed_bytes,
                capacity_bytes=rung.capacity_bytes,
                step_s=rung.step_s(self._passes(size)),
            )
            for size, rung in sorted(self.rungs.items())
        )

    def _first(self) -> tuple[int, ...]:
        """The predicted largest, from the smallest up: small ones are cheap, and say where the edge is."""
        below = [size for size in self.sizes if size <= self._predicted]
        return _spread(below, self._at_once)

    def _towards_the_edge(self) -> tuple[int, ...]:
        """Larger ones that may run, if it is not known already that they do not."""
        low, high = self.largest or 0, self.too_large or math.inf
        unknown = [size for size in self.sizes if low < size < high]
        if not unknown:
            return ()
        shares = {size: share for size in unknown if (share := self._share_of_memory(size)) is not None}
        if shares:
            return self._at_the_levels(low, {size: share for size, share in shares.items() if share <= 1})
        if self.too_large is None:
            return self._grown(low, unknown)
        return tuple(unknown[len(unknown) // 2 :][:1]) if self._at_once == 1 else _spread(unknown, self._at_once)

    def _at_the_levels(self, low: int, shares: dict[int, float]) -> tuple[int, ...]:
        """Of those that may fit, by their shares of memory: the largest, one near each level, and one half way."""
        if not shares:
            return ()
        largest = max(shares)
        near = [max((size for size, share in shares.items() if share <= most), default=None) for most in SHARES]
        half_way = min(shares, key=lambda size: abs(size - math.sqrt(max(low, 1) * largest)))
        wanted = dict.fromkeys([largest, *(size for size in reversed(near) if size is not None), half_way])
        return tuple(sorted(list(wanted)[: self._at_once]))

    def _grown(self, low: int, unknown: Sequence[int]) -> tuple[int, ...]:
        grown: list[int] = []
        while len(grown) < self._at_once and unknown[-1] > low:
            larger = [size for size in unknown if size > low]
            low = max((size for size in larger if size <= low + GROWTH[1]), default=larger[0])
            grown.append(low)
        return tuple(grown)

    def _towards_the_fastest(self) -> tuple[int, ...]:
        """Those between measured ones that may be faster than all of them: more samples never take less time."""
        timed = {size: rung for size, rung in self.rungs.items() if rung.pass_s is not None}
        if not timed or self.probes >= ENOUGH_PROBES:
            return ()
        best_s = min(self._expected_s(size, timed, 1.0) for size in timed)
        between = [size for size in self.sizes if min(timed) < size < max(timed) and size not in self.rungs]
        may_be = [size for size in between if self._expected_s(size, timed, 0.0) < best_s * (1 - SAME_TIME)]
        likely = sorted(may_be, key=lambda size: self._expected_s(size, timed, 1.0))
        return tuple(sorted(likely[: self._at_once]))

    def _beside_the_fastest(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Add the fastest one so far where there is room: times of one process compare, those of two less so."""
        timed = {size: rung for size, rung in self.rungs.items() if rung.pass_s is not None}
        if not sizes or not timed or len(sizes) >= self._at_once:
            return sizes
        return tuple(sorted({*sizes, min(timed, key=lambda size: self._expected_s(size, timed, 1.0))}))

    def _in_turn(self) -> tuple[int, ...]:
        """The fastest, turn by turn, where they differ by less than the steps of one of them do."""
        times = {size: s for size, rung in self.rungs.items() if (s := rung.step_s(self._passes(size))) is not None}
        if self._at_once == 1 or self._spread <= SAME_TIME:
            return ()
        near = [size for size in times if times[size] <= (1 + self._spread) * min(times.values())]
        fastest = sorted(near, key=lambda size: times[size])[: self._at_once]
        if len(fastest) < 2 or all(self.rungs[size].rounds >= ROUNDS for size in fastest):
            return ()
        return tuple(sorted(fastest)) * ROUNDS

    def _expected_s(self, size: int, timed: dict[int, Rung], growth: float) -> float:
        """Return the seconds of a step; a pass is longer than that of the size below by `growth` of a straight line."""
        below, above = max(m for m in timed if m <= size), min(m for m in timed if m >= size)
        share = 0.0 if above == below else growth * (size - below) / (above - below)
        low, high = timed[below], timed[above]
        assert low.pass_s is not None and high.pass_s is not None
        pass_s = low.pass_s + share * (high.pass_s - low.pass_s)
        return self._passes(size) * pass_s + low.once_s + share * (high.once_s - low.once_s)

    def _share_of_memory(self, size: int) -> float | None:
        """Return the least share that a micro-batch may need.

        A step of a single pass has no gradients yet while it goes forward. They are as large as the weights at most, so
        that half of what does not depend on the micro-batch may be saved.
        """
        needed = self.needed_bytes(size)
        capacity = [rung.capacity_bytes for rung in self.rungs.values() if rung.capacity_bytes]
        if needed is None or not capacity:
            return None
        if self._passes(size) == 1:
            needed -= max(0.0, self._fixed_bytes()) / 2
        return needed / min(capacity)

    def _fixed_bytes(self) -> float:
        """Return what is needed whatever the micro-batch, by the line through the two largest."""
        at_none = self.needed_bytes(0)
        return 0.0 if at_none is None else at_none

    def _passes(self, size: int) -> int:
        return -(-self._share // size)


def sizes_of(share: int) -> tuple[int, ...]:
    """Return the micro-batches that a rank's share of a step can be cut into: the largest of 1, 2, 3, ... parts."""
    return tuple(sorted({-(-share // parts) for parts in range(1, share + 1)}))


def _spread(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the largest, and others at equal ratios below it down to the smallest."""
    if count == 1 or len(sizes) == 1:
        return (sizes[-1],)
    ratio = (sizes[-1] / sizes[0]) ** (1 / (count - 1))
    wanted = [sizes[0] * ratio**step for step in range(count)]
    return tuple(sorted({min(sizes, key=lambda size: abs(math.log(size / aim))) for aim in wanted}))
