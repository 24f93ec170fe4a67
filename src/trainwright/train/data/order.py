"""The order of the data as a pure function of (seed, epoch, index), so that a position is only a number of samples."""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_HELD_OUT = _MASK  # stands where an epoch stands in the key, and no epoch gets there
_SAMPLED = _MASK - 1


def epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return the order in which epoch `epoch` visits samples 0 ... n-1, as int64 of shape (n,).

    A sort by a keyed 64-bit hash (splitmix64, Steele, Lea and Flood, OOPSLA 2014): integer arithmetic alone, so that
    the same order comes out of every numpy version, machine and world size. numpy promises no such thing for its own
    shuffles (NEP 19).
    """
    return np.argsort(_hashes(_key(seed, epoch), n), kind="stable")


def held_out(seed: int, n: int, share: float) -> np.ndarray:
    """Return which of n rows are set aside for evaluation, as bool of shape (n,): `share` of them, rounded.

    At least one row is held out, and at least one is not.
    """
    assert 0 < share < 1 and n >= 2
    mask = np.zeros(n, dtype=bool)
    mask[np.argsort(_hashes(_key(seed, _HELD_OUT), n), kind="stable")[: min(max(1, round(n * share)), n - 1)]] = True
    return mask


def sampled(seed: int, n: int, size: int) -> np.ndarray:
    """Return which of n rows make up a random sample of `size` rows (all, when there are no more), as bool (n,)."""
    if n <= size:
        return np.ones(n, dtype=bool)
    mask = np.zeros(n, dtype=bool)
    mask[np.argsort(_hashes(_key(seed, _SAMPLED), n), kind="stable")[:size]] = True
    return mask


def _key(seed: int, epoch: int) -> int:
    return _splitmix64(_splitmix64(seed & _MASK) ^ (epoch & _MASK))


def _splitmix64(x: int) -> int:
    z = (x + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def _hashes(key: int, n: int) -> np.ndarray:
    z = np.arange(n, dtype=np.uint64)
    z += np.uint64((key + _GAMMA) & _MASK)  # arrays of uint64 wrap around, as the algorithm wants
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MIX_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX_2)
    z ^= z >> np.uint64(31)
    return z
