"""The search for the largest micro-batch, against devices whose memory is a formula."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field, replace

import pytest

from trainwright.plan.search import SAME_TIME
from trainwright.plan.tuned import MeasuredMicroBatch
from trainwright.tune.search import MOST_PROBES, ProbeOutcome, ProbeSearch, Rung, sizes_of
from trainwright.tune.tuning import levels_of


@dataclass(frozen=True)
class FormulaDevice:
    """A device on which a pass of m samples needs `base + slope m`, and above `knee` samples more for each."""

    capacity_bytes: int
    base: int
    slope: int
    knee: int = 10**9
    steeper: int = 0
    overhead_s: float = 0.01
    sample_s: float = 0.001
    known: bool = True

    def needed(self, size: int) -> int:
        """Return the peak of a micro-batch."""
        return self.base + self.slope * size + self.steeper * max(0, size - self.knee)

    def pass_s(self, size: int) -> float:
        """Return the time of a pass; it bends upwards where caches no longer hold a batch."""
        return self.overhead_s + self.sample_s * size + 0.5 * self.sample_s * max(0, size - self.knee)

    def probe(self, sizes: tuple[int, ...]) -> ProbeOutcome:
        """Climb like a probe does: what ran before memory ran out is known."""
        fitting = [size for size in sizes if self.needed(size) <= self.capacity_bytes]
        failed = [size for size in sizes if size not in fitting]
        rungs = [
            Rung(
                micro_batch_size=size,
                needed_bytes=self.needed(size) if self.known else None,
                capacity_bytes=self.capacity_bytes if self.known else None,
                pass_s=self.pass_s(size),
                once_s=0.002,
                rounds=sizes.count(size),
            )
            for size in dict.fromkeys(fitting)
        ]
        return ProbeOutcome(
            rungs=tuple(rungs), too_large=min(failed, default=None), why="out of memory" if failed else None
        )


def searched(device: FormulaDevice, share: int, predicted: int, at_once: int = 4) -> ProbeSearch:
    """Return the search after its last probe."""
    search = ProbeSearch(sizes_of(share), predicted, share, at_once=at_once)
    while sizes := search.next_sizes():
        assert list(sizes) == sorted(set(sizes))
        assert len(sizes) <= at_once
        search.take(device.probe(sizes))
    return search


def random_devices(seed: int, count: int) -> list[tuple[FormulaDevice, int, int]]:
    """Return devices, the share of a rank, and a prediction that is off by up to a factor of four."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        share, slope = draw.choice([8, 16, 24, 32, 64, 100, 256]), draw.randint(1, 50)
        base = draw.randint(0, 2000)
        edge = draw.randint(1, round(1.3 * share))
        knee = draw.choice([10**9, draw.randint(1, share)])
        device = FormulaDevice(
            0, base, slope, knee, draw.randint(0, 2 * slope), draw.random() / 20, draw.random() / 100
        )
        device = FormulaDevice(device.needed(edge) + draw.randrange(slope), *list(vars(device).values())[1:])
        found.append((device, share, max(1, round(edge * draw.choice([0.25, 0.5, 0.9, 1.0, 1.1, 2.0, 4.0])))))
    return found


def test_the_largest_that_runs_is_found_in_four_probes_and_mostly_in_three() -> None:
    """Done-when 1: within one step of the largest, at most 4 probes and a median of at most 3, from a cold store."""
    probes = []
    for device, share, predicted in random_devices(1, 600):
        search = searched(device, share, predicted)
        fits = [size for size in sizes_of(share) if device.needed(size) <= device.capacity_bytes]
        sizes = search.sizes
        assert search.largest is not None
        assert abs(sizes.index(search.largest) - sizes.index(fits[-1])) <= 1, (device, share, predicted)
        assert search.probes <= MOST_PROBES
        probes.append(search.probes)
    assert statistics.median(probes) <= 3


def test_the_fastest_is_within_three_percent_of_a_sweep_over_all() -> None:
    """Done-when 1: where a pass takes what its neighbours let expect, or is measured itself."""
    for device, share, predicted in random_devices(2, 300):
        search = searched(device, share, predicted)
        sweep = {size: -(-share // size) * device.pass_s(size) + 0.002 for size in sizes_of(share)}
        possible = [s for size, s in sweep.items() if device.needed(size) <= device.capacity_bytes]
        found = min(point.step_s for point in search.points() if point.step_s is not None)
        assert found <= min(possible) * (1 + SAME_TIME) + 1e-12, (device, share, predicted)


@dataclass(frozen=True)
class UnsteadyDevice(FormulaDevice):
    """One on which a micro-batch takes up to half as long again in one process as in the next, but for turn by turn."""

    draw: random.Random = field(default_factory=lambda: random.Random(3))

    def probe(self, sizes: tuple[int, ...]) -> ProbeOutcome:
        """Climb like a probe does, each micro-batch at a speed of its own where it has one turn alone."""
        outcome = super().probe(sizes)
        slower = [1.0 if rung.rounds > 1 else self.draw.uniform(1.0, 1.5) for rung in outcome.rungs]
        rungs = [
            replace(rung, pass_s=factor * (rung.pass_s or 0))
            for rung, factor in zip(outcome.rungs, slower, strict=True)
        ]
        return replace(outcome, rungs=tuple(rungs))


def test_where_times_differ_from_probe_to_probe_the_fastest_take_turns() -> None:
    """Done-when 1: what was measured once each in processes of their own is not taken for a comparison."""
    device = UnsteadyDevice(capacity_bytes=750, base=100, slope=100, overhead_s=0.05, sample_s=0.005)
    turns = 0
    for _ in range(40):
        search = ProbeSearch(sizes_of(16), 8, 16)
        while sizes := search.next_sizes():
            turns += len(set(sizes)) < len(sizes)
            search.take(device.probe(sizes))
        fastest = min(search.points(), key=lambda point: point.step_s or 0).micro_batch_size
        passes_s = {size: -(-16 // size) * device.pass_s(size) for size in search.rungs}
        compared = [size for size in passes_s if search.rungs[size].rounds > 1]
        assert not compared or fastest == min(compared, key=lambda size: passes_s[size])
        assert search.probes <= MOST_PROBES
    assert turns > 10
    steady = ProbeSearch(sizes_of(16), 8, 16)
    while sizes := steady.next_sizes():
        assert len(set(sizes)) == len(sizes), "times that do not differ need no turns"
        steady.take(FormulaDevice(750, 100, 100).probe(sizes))


def test_without_figures_of_memory_a_batch_grows_by_at_most_eight_and_is_then_halved_in() -> None:
    """S2-32, S2-34: 24 is too much, 16 runs, 20 runs, then fine; one micro-batch a probe, as scripts are tried."""
    device = FormulaDevice(capacity_bytes=230, base=10, slope=10, known=False)
    search = ProbeSearch(tuple(range(1, 65)), 8, 64, at_once=1)
    tried = []
    while sizes := search.next_sizes():
        tried += sizes
        search.take(device.probe(sizes))
    assert tried == [8, 16, 24, 20, 22, 23]
    assert (search.largest, search.too_large) == (22, 23)


def test_a_probe_that_is_killed_or_hangs_costs_only_itself() -> None:
    """Done-when 4: the same is tried again; only what is lost twice counts as too large."""
    device = FormulaDevice(capacity_bytes=1000, base=0, slope=10, steeper=0)
    search = ProbeSearch(sizes_of(64), 16, 64)
    first = search.next_sizes()
    search.take(ProbeOutcome(lost_at=first[-1], why="rank 1 was ended by SIGKILL"))
    assert search.next_sizes() == first
    search.take(device.probe(first))
    while sizes := search.next_sizes():
        search.take(device.probe(sizes))
    assert (search.largest, search.too_large, search.lost) == (64, None, 1)
    twice = ProbeSearch(sizes_of(64), 16, 64)
    for _ in range(2):
        twice.take(ProbeOutcome(rungs=device.probe((1, 4)).rungs, lost_at=16, why="it had not ended after 600 s"))
    assert twice.too_large == 16
    assert twice.why == "it had not ended after 600 s, twice"


def test_where_a_single_sample_is_too_much_nothing_more_is_tried() -> None:
    search = searched(FormulaDevice(capacity_bytes=5, base=10, slope=1), 32, 8)
    assert search.is_hopeless
    assert search.probes == 1


@pytest.mark.parametrize(("share", "sizes"), [(1, (1,)), (5, (1, 2, 3, 5)), (16, (1, 2, 3, 4, 6, 8, 16))])
def test_only_micro_batches_that_a_share_can_be_cut_into_are_tried(share: int, sizes: tuple[int, ...]) -> None:
    """16 in parts of at most 7 are 6, 5 and 5: the global batch is kept, and 7 is never what runs (T-11)."""
    assert sizes_of(share) == sizes


def test_levels_are_points_of_the_guide_on_what_was_measured() -> None:
    """S2-36, S2-07: 12, 16, 20 and 24; by use of memory where it is known, `recommended` being the fastest there."""
    points = [
        MeasuredMicroBatch(micro_batch_size=size, needed_bytes=need, capacity_bytes=100, step_s=step_s)
        for size, need, step_s in (
            (8, 45, 4.0),
            (12, 68, 3.0),
            (16, 80, 2.0),
            (18, 84, 2.2),
            (20, 89, 1.9),
            (24, 97, 1.8),
        )
    ]
    assert levels_of(points, limited=True) == {
        "conservative": 12,
        "recommended": 16,
        "aggressive": 20,
        "extreme": 24,
    }
    unknown = [MeasuredMicroBatch(micro_batch_size=size) for size in (8, 12, 16, 20, 24)]
    assert list(levels_of(unknown, limited=True).values()) == [12, 16, 20, 24]
    assert list(levels_of(unknown, limited=False).values()) == [24, 24, 24, 24]
