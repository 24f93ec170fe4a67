"""The data order is a pure function of (seed, epoch, index)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.train.data.order import epoch_order, held_out, sampled

_MASK = (1 << 64) - 1


def _splitmix64(x: int) -> int:
    """As published by Vigna (https://prng.di.unimi.it/splitmix64.c), in Python's own integers."""
    z = (x + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def test_splitmix64_here_is_the_published_one() -> None:
    """First outputs of splitmix64 from the seed 1234567, as the test vectors of many implementations give them."""
    assert [_splitmix64((1234567 + i * 0x9E3779B97F4A7C15) & _MASK) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(seed=st.integers(0, 2**70), epoch=st.integers(0, 10**6), n=st.integers(1, 300))
def test_order_equals_the_one_computed_with_python_integers(seed: int, epoch: int, n: int) -> None:
    key = _splitmix64(_splitmix64(seed & _MASK) ^ epoch)
    expected = sorted(range(n), key=lambda i: _splitmix64((key + i) & _MASK))
    assert epoch_order(seed, epoch, n).tolist() == expected


def test_order_is_a_permutation_and_differs_by_epoch_and_seed() -> None:
    orders = [epoch_order(seed, epoch, 5000) for seed in (0, 1, 42) for epoch in range(3)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(5000))
    for i, one in enumerate(orders):
        for other in orders[i + 1 :]:
            assert np.mean(one == other) < 0.01, "two orders that share more places than chance allows"


def test_order_leaves_no_neighbours_together() -> None:
    """A shuffle in name only would leave rows that follow each other in the file side by side in a batch."""
    order = epoch_order(7, 3, 20_000)
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.001


@pytest.mark.parametrize(("n", "share", "expected"), [(1000, 0.1, 100), (10, 0.01, 1), (2, 0.9, 1), (7, 0.5, 4)])
def test_held_out_has_the_share_rounded_and_both_sides_some(n: int, share: float, expected: int) -> None:
    mask = held_out(42, n, share)
    assert mask.sum() == expected
    assert (mask == held_out(42, n, share)).all()


def test_held_out_follows_the_seed() -> None:
    assert (held_out(1, 1000, 0.1) != held_out(2, 1000, 0.1)).any()


def test_sampled_takes_all_of_a_small_set_and_the_size_of_a_large_one() -> None:
    assert sampled(0, 50, 100).all()
    assert sampled(0, 5000, 100).sum() == 100
