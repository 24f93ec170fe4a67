"""What finds passages: chosen by name, prepared once on the machine, opened by each worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainwright.evaluate.retrieval.bm25 import Bm25Index, open_index
from trainwright.evaluate.retrieval.dense import DenseIndex, PassageEncoder, find_encoder, open_embeddings
from trainwright.evaluate.retrieval.passages import Chunking, Passage

FUSED = 100
"""Passages of each ranking that a hybrid search fuses, or more where more are wanted."""
RRF_K = 60


@dataclass(frozen=True)
class PassageQuery:
    """A query, how many passages are wanted, and the ids of those that are known already and not wanted again."""

    query: str
    k: int
    known: frozenset[str] = frozenset()


class Retriever(Protocol):
    """Anything that finds passages for many queries at once."""

    def search(self, searches: Sequence[PassageQuery]) -> list[list[Passage]]:
        """Return the new passages that each search finds, the best first; fewer where there are no more."""
        ...


@dataclass(frozen=True)
class Bm25:
    """BM25 over an index on disk."""

    index: Bm25Index

    def search(self, searches: Sequence[PassageQuery]) -> list[list[Passage]]:
        return [_new(asked, self._ranking(asked)) for asked in searches]

    def _ranking(self, asked: PassageQuery) -> list[Passage]:
        return [hit.passage for hit in self.index.search(asked.query, _depth([asked]))]


@dataclass(frozen=True)
class Dense:
    """Nearness of embeddings, exact."""

    index: DenseIndex

    def search(self, searches: Sequence[PassageQuery]) -> list[list[Passage]]:
        rankings = self.index.search([asked.query for asked in searches], _depth(searches))
        return [_new(asked, ranking) for asked, ranking in zip(searches, rankings, strict=True)]


@dataclass(frozen=True)
class Hybrid:
    """Both, fused by rank."""

    words: Bm25Index
    dense: DenseIndex

    def search(self, searches: Sequence[PassageQuery]) -> list[list[Passage]]:
        depth = max(FUSED, _depth(searches))
        nearest = self.dense.search([asked.query for asked in searches], depth)
        by_words = [[hit.passage for hit in self.words.search(asked.query, depth)] for asked in searches]
        return [
            _new(asked, reciprocal_rank_fusion(rankings))
            for asked, *rankings in zip(searches, by_words, nearest, strict=True)
        ]


def _depth(searches: Sequence[PassageQuery]) -> int:
    """Return how long a ranking must be for each search to find its new passages in it."""
    return max(asked.k + len(asked.known) for asked in searches)


def _new(asked: PassageQuery, ranking: Sequence[Passage]) -> list[Passage]:
    return [passage for passage in ranking if passage.id not in asked.known][: asked.k]


def prepare(
    method: str,
    corpus: Path,
    chunking: Chunking,
    cache: Path,
    *,
    encoder: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Index a corpus, unless that is done already, and return how a worker opens it: plain data, with the size.

    `dense` and `hybrid` have its passages embedded by `encoder`, a folder or a name of the hub, in a process with
    `environment`.

    Raises:
        UserError: a package is missing, there is no such corpus or encoder, or the corpus holds no words.
    """
    encoder_folder = None if encoder is None else find_encoder(encoder)
    index = open_index(corpus, cache, chunking=chunking)
    prepared = {"method": method, "folder": str(index.folder), "passages": len(index)}
    if encoder_folder is not None:
        embeddings = open_embeddings(index.folder, encoder_folder, cache, environment or {})
        prepared |= {"encoder": str(encoder_folder), "embeddings": str(embeddings)}
    return prepared


def open_retriever(prepared: Mapping[str, Any]) -> Retriever:
    """Return the retriever that `prepare` made ready.

    Queries are embedded on the processor: they are short, and the GPU's memory is the model's.
    """
    words = Bm25Index(Path(prepared["folder"]))
    if prepared["method"] == "bm25":
        return Bm25(words)
    encoder = PassageEncoder(Path(prepared["encoder"]), device="cpu")
    dense = DenseIndex(words.passages, Path(prepared["embeddings"]), encoder)
    return Dense(dense) if prepared["method"] == "dense" else Hybrid(words, dense)


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
