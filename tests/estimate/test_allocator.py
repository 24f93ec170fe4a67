"""The simulator of the caching allocator, against cases worked by hand from its rules."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.estimate.allocator import KIB, MIB, CachingAllocator, MemoryEvent, replay


def test_sizes_are_rounded_to_512_bytes() -> None:
    allocator = CachingAllocator()
    for key, size in enumerate((1, 512, 513)):
        allocator.allocate(key, size)
    assert allocator.allocated_bytes == 512 + 512 + 1024
    assert allocator.requested_bytes == 1 + 512 + 513


@pytest.mark.parametrize(
    ("request_bytes", "segment_bytes"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB),  # rounded to 10 MiB before the segment is chosen
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segment_of_a_first_request(request_bytes: int, segment_bytes: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, request_bytes)
    assert allocator.reserved_bytes == segment_bytes


def test_small_and_large_requests_never_share_a_segment() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 2 * MIB)  # 20 MiB segment with 18 MiB left
    allocator.allocate(1, KIB)
    assert allocator.reserved_bytes == 22 * MIB


def test_streams_never_share_a_segment() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 2 * MIB, stream=0)
    allocator.free(0)
    allocator.allocate(1, 2 * MIB, stream=1)
    assert allocator.reserved_bytes == 40 * MIB


def test_the_rest_of_a_large_block_is_split_off_only_above_one_mib() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 19 * MIB)  # a segment of its own, 20 MiB
    assert allocator.allocated_bytes == 20 * MIB  # 1 MiB left is not above 1 MiB: it stays in the block
    other = CachingAllocator()
    other.allocate(0, 5 * MIB)
    assert other.allocated_bytes == 5 * MIB
    other.allocate(1, 14 * MIB + 1)  # 15 MiB are left of 20; the rest of this request is below 1 MiB
    assert (other.allocated_bytes, other.reserved_bytes) == (20 * MIB, 20 * MIB)


def test_the_best_fit_is_taken_not_the_first() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 40 * MIB)
    allocator.allocate(1, 30 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(2, 25 * MIB)  # takes the block of 30, and leaves the one of 40 whole
    allocator.allocate(3, 40 * MIB)
    assert allocator.reserved_bytes == 70 * MIB


def test_neighbours_merge_when_they_are_free() -> None:
    allocator = CachingAllocator()
    for key in range(4):
        allocator.allocate(key, 5 * MIB)  # one segment of 20 MiB in four
    for key in (0, 2, 1, 3):
        allocator.free(key)
    allocator.allocate(9, 18 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_fragments_cannot_serve_a_request_that_their_sum_could() -> None:
    """Two free blocks of 8 MiB with one in use between them: 16 MiB are free, 12 MiB cannot be had."""
    allocator = CachingAllocator()
    allocator.allocate(0, 8 * MIB)
    allocator.allocate(1, 4 * MIB)
    allocator.allocate(2, 8 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(0)
    allocator.free(2)
    allocator.allocate(3, 12 * MIB)
    assert allocator.reserved_bytes == 32 * MIB
    assert allocator.allocated_bytes == 16 * MIB


def test_under_pressure_cached_segments_are_given_back_and_the_request_tried_again() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.allocate(0, 60 * MIB)
    allocator.free(0)
    allocator.allocate(1, 80 * MIB)  # 60 cached + 80 is too much: the 60 go back first
    assert (allocator.retries, allocator.out_of_memory) == (1, False)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (80 * MIB, 80 * MIB)


def test_a_segment_in_partial_use_cannot_be_given_back() -> None:
    """The fragmentation that ends jobs: 50 of 100 MiB are used, and 60 more are not to be had."""
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.allocate(0, 60 * MIB)
    allocator.free(0)
    allocator.allocate(1, 50 * MIB)  # in the segment of 60
    allocator.allocate(2, 45 * MIB)
    assert (allocator.retries, allocator.out_of_memory) == (1, True)
    assert allocator.peak_reserved_bytes == 106 * MIB  # 60 + 46: what would have been needed


def test_expandable_segments_grow_by_what_is_missing() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    allocator.allocate(0, 30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB  # pages of 20 MiB
    allocator.allocate(1, 15 * MIB)  # 10 MiB are left; one page more
    assert allocator.reserved_bytes == 60 * MIB
    assert allocator.allocated_bytes == 45 * MIB


def test_expandable_segments_give_back_pages_in_the_middle_and_map_them_again() -> None:
    allocator = CachingAllocator(expandable_segments=True, capacity_bytes=120 * MIB)
    allocator.allocate(0, 20 * MIB)
    allocator.allocate(1, 60 * MIB)
    allocator.allocate(2, 20 * MIB)
    allocator.free(1)
    allocator.allocate(3, 80 * MIB)  # 100 are mapped, 60 of them free in the middle: they go back, 80 come at the end
    assert (allocator.retries, allocator.out_of_memory) == (1, False)
    assert allocator.reserved_bytes == 120 * MIB
    allocator.free(3)
    allocator.release_cached()
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(4, 55 * MIB)  # fits the hole between 0 and 2
    assert allocator.reserved_bytes == 100 * MIB


def test_expandable_segments_waste_less_than_fixed_ones() -> None:
    """The pattern of a growing sequence length: each request is a little larger than what was freed before it."""
    events = []
    for key, size in enumerate(range(64 * MIB, 128 * MIB, 4 * MIB)):
        events += [MemoryEvent(key, size), MemoryEvent(key, -size)]
    fixed, expandable = replay(events), replay(events, expandable_segments=True)
    assert fixed.peak_reserved_bytes > 10 * fixed.peak_allocated_bytes
    assert expandable.peak_reserved_bytes <= expandable.peak_allocated_bytes + 20 * MIB


@st.composite
def histories(draw: st.DrawFn) -> list[MemoryEvent]:
    """Allocations of all kinds of sizes on two streams, most of them freed, in any order, some while still used."""
    sizes = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(9 * MIB, 60 * MIB))
    events: list[MemoryEvent] = []
    live: list[MemoryEvent] = []
    keys = itertools.count()
    for _ in range(draw(st.integers(1, 60))):
        if live and draw(st.booleans()):
            gone = live.pop(draw(st.integers(0, len(live) - 1)))
            events.append(MemoryEvent(gone.key, -gone.size_bytes, gone.stream, draw(st.booleans())))
            if events[-1].held and draw(st.booleans()):
                events.append(MemoryEvent(gone.key, 0))
        else:
            new = MemoryEvent(next(keys), draw(sizes), draw(st.integers(0, 1)))
            live.append(new)
            events.append(new)
    return events


@given(history=histories(), expandable=st.booleans(), capacity=st.none() | st.integers(30 * MIB, 300 * MIB))
def test_what_holds_for_every_history(history: list[MemoryEvent], expandable: bool, capacity: int | None) -> None:
    allocator = CachingAllocator(expandable_segments=expandable, capacity_bytes=capacity)
    live: dict[int, int] = {}
    for key, size, stream, still_used in history:
        if size > 0:
            allocator.allocate(key, size, stream)
            live[key] = size
        elif size < 0:
            allocator.free(key, held=still_used)
            del live[key]
        else:
            allocator.let_go(key)
        assert allocator.requested_bytes == sum(live.values())
        assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes
        if capacity is not None and not allocator.out_of_memory:
            assert allocator.reserved_bytes <= capacity
    for key in live:
        allocator.free(key)
    assert (allocator.allocated_bytes, allocator.requested_bytes) == (0, 0)
    allocator.release_cached()
    assert allocator.reserved_bytes == 0


@given(history=histories(), expandable=st.booleans())
def test_the_peak_of_what_is_asked_for_is_that_of_the_running_sum(history: list[MemoryEvent], expandable: bool) -> None:
    peak = max(itertools.accumulate(event.size_bytes for event in history))
    assert replay(history, expandable_segments=expandable).peak_requested_bytes == peak
