"""Addresses as the driver gave them on an H200 (histories of benchmarks/gpu): downward, in chunks of 32 MiB."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainwright.estimate.addresses import CHUNK_BYTES, Addresses

MIB = 1 << 20


def test_large_ones_lie_below_all_before_them_in_whole_chunks() -> None:
    addresses = Addresses()
    first, second, third = (addresses.take(size * MIB) for size in (448, 1000, 2000))
    assert (first - second, second - third) == (1024 * MIB, 2016 * MIB)


def test_small_ones_share_a_chunk_upwards() -> None:
    addresses = Addresses()
    places = [addresses.take(2 * MIB) for _ in range(3)]
    assert [place - places[0] for place in places] == [0, 2 * MIB, 4 * MIB]
    assert addresses.take(30 * MIB) < places[0], "what is left of the chunk is too small"


def test_what_was_given_back_is_taken_again_from_the_top() -> None:
    addresses = Addresses()
    high, low = addresses.take(448 * MIB), addresses.take(448 * MIB)
    addresses.give_back(high)
    assert addresses.take(512 * MIB) < low
    assert addresses.take(128 * MIB) == high + 320 * MIB


@given(st.lists(st.tuples(st.integers(1, 200), st.booleans()), max_size=60))
def test_nothing_overlaps_and_all_comes_back(wishes: list[tuple[int, bool]]) -> None:
    addresses, taken = Addresses(), dict[int, int]()
    for size, keeps in wishes:
        start = addresses.take(2 * size * MIB)
        assert all(start + 2 * size * MIB <= other or other + held <= start for other, held in taken.items())
        taken[start] = 2 * size * MIB
        if not keeps:
            gone = min(taken)
            addresses.give_back(gone)
            del taken[gone]
    for start in taken:
        addresses.give_back(start)
    assert addresses.take(CHUNK_BYTES) == Addresses().take(CHUNK_BYTES)
