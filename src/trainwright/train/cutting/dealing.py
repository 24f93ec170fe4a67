"""Samples sorted by length and dealt to ranks, so that padding is little and no rank has more to compute."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.integer]


def longest_first(lengths: Lengths) -> Places:
    """Return the places of all samples by their length, those of equal length in the order given."""
    return np.argsort(-lengths.astype(np.int64), kind="stable")


def deal(
    lengths: Lengths, sizes: Sequence[Sequence[int]], weights: Sequence[int], *, together: bool
) -> list[list[Places]]:
    """Deal the places of samples in pieces of neighbours by length; the first piece of a rank is its longest.

    `sizes` has the samples of each piece, by rank; they add up to those there are. The next piece goes to the rank
    that has the fewest tokens for its weight, padding included; with `together` among those that have the fewest
    pieces, so that pieces of one number are alike on all ranks.
    """
    order = longest_first(lengths)
    assert sum(map(sum, sizes)) == len(order)
    dealt: list[list[Places]] = [[] for _ in sizes]
    waiting = [(0, 0.0, rank) for rank, own in enumerate(sizes) if own]
    start = 0
    while waiting:
        turn, tokens, rank = heapq.heappop(waiting)
        size = sizes[rank][len(dealt[rank])]
        piece = order[start : start + size]
        start += size
        dealt[rank].append(piece)
        if size:
            tokens += size * int(lengths[piece[0]]) / weights[rank]
        if len(dealt[rank]) < len(sizes[rank]):
            heapq.heappush(waiting, (turn + together, tokens, rank))
    return dealt


def typical(lengths: Lengths, count: int) -> Places:
    """Return the places of `count` neighbours by length whose mean length is nearest to that of all samples."""
    order = longest_first(lengths)
    count = min(count, len(order))
    summed = np.concatenate([[0], np.cumsum(lengths[order], dtype=np.int64)])
    means = (summed[count:] - summed[:-count]) / count
    start = int(np.argmin(np.abs(means - lengths.mean())))
    return order[start : start + count]
