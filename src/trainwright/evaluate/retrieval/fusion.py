"""Several rankings of the same passages as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from trainwright.evaluate.retrieval.passages import Passage

RRF_K = 60


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Passage]]) -> list[Passage]:
    """Return all ranked passages by the sum of 1 / (60 + rank) over the rankings that hold them, ranks from 1.

    Of equal sums the one met first comes first. Cormack, Clarke, Buettcher: Reciprocal Rank Fusion Outperforms
    Condorcet and Individual Rank Learning Methods, SIGIR 2009, with their constant.
    """
    sums: defaultdict[Passage, float] = defaultdict(float)
    for ranking in rankings:
        for rank, passage in enumerate(ranking, 1):
            sums[passage] += 1 / (RRF_K + rank)
    return sorted(sums, key=lambda passage: -sums[passage])
