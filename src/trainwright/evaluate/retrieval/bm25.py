"""BM25 over a corpus, by bm25s: built once for the same text, kept beside other caches, and mapped into memory.

    <cache>/bm25/<key>/  passages.jsonl  passages.offsets  index/  meta.json

The key is the hash of the corpus and of how it is cut and indexed. An index is written beside its place and renamed
into it; of two processes that build the same one, the first to finish wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from trainwright.errors import UserError, not_installed
from trainwright.evaluate.questions.question import Question
from trainwright.evaluate.retrieval.passages import (
    Chunking,
    Passage,
    PassageFile,
    PassageWriter,
    corpus_files,
    read_passages,
)

FORMAT = 2
# Lucene's variant and constants are what bm25s takes by default; named, so that a new default cannot move results.
METHOD, K1, B = "lucene", 1.5, 0.75
STOPWORDS = "english"


@dataclass(frozen=True)
class Hit:
    """A passage that was found, with its BM25 score."""

    passage: Passage
    score: float


class Bm25Index:
    """An index on disk; opening it reads next to nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.passages = PassageFile(folder)
        self._index = _bm25s().BM25.load(folder / "index", mmap=True, load_corpus=False, show_progress=False)

    def __len__(self) -> int:
        return len(self.passages)

    def known(self, text: str) -> frozenset[int]:
        """Return the words of `text` that the corpus has, as the numbers it knows them by; common words are none."""
        [tokens] = _tokens([text], ids=False)
        return frozenset(self._index.get_tokens_ids(tokens))

    def search(self, query: str, k: int, *, skip: int = 0) -> list[Hit]:
        """Return the `k` best passages after the first `skip`, fewer if fewer share a word with the query.

        Of equal scores the earlier passage comes first, whatever the library's own order.
        """
        [tokens] = _tokens([query], ids=False)
        known = self._index.get_tokens_ids(tokens)
        wanted = min(k + skip, len(self))
        if not known or wanted < 1:
            return []
        scores = self._index.get_scores_from_ids(known)
        least = scores.copy()
        least.partition(len(self) - wanted)
        candidates = (scores >= max(least[len(self) - wanted], 0.0)).nonzero()[0].tolist()
        ranked = sorted((-float(scores[index]), index) for index in candidates if scores[index] > 0)
        return [Hit(self.passages[index], -negative) for negative, index in ranked[skip:wanted]]


def open_index(corpus: Path, cache: Path, *, chunking: Chunking | None = None) -> Bm25Index:
    """Return the index of a corpus, from the cache if it is there, else built.

    Raises:
        UserError: bm25s is missing, there is no such corpus, or it holds no words.
    """
    chunking = chunking or Chunking()
    bm25s = _bm25s()
    folder = cache / "bm25" / _key(corpus, chunking)
    if not (folder / "meta.json").exists():
        with _unfinished(folder) as unfinished:
            _build(bm25s, corpus, chunking, unfinished)
    return Bm25Index(folder)


def _build(bm25s: Any, corpus: Path, chunking: Chunking, folder: Path) -> None:
    with PassageWriter(folder) as passages:

        def texts() -> Iterator[str]:
            for passage in read_passages(corpus, chunking):
                passages.write(passage)
                yield passage.searched

        tokens = _tokens(texts(), ids=True)
    if not tokens.vocab:
        raise UserError(f"{corpus} holds no words to search", hints=["name a folder of text files"])
    index = bm25s.BM25(k1=K1, b=B, method=METHOD, backend="numpy")
    index.index(tokens, show_progress=False)
    index.save(folder / "index", show_progress=False)
    meta = {"format": FORMAT, "corpus": str(corpus), "passages": len(passages), "chunking": asdict(chunking)}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def _tokens(texts: Any, *, ids: bool) -> Any:
    return _bm25s().tokenize(texts, stopwords=STOPWORDS, return_ids=ids, show_progress=False)


def _key(corpus: Path, chunking: Chunking) -> str:
    """Return the hash of all that the index follows from."""
    made_by = [FORMAT, asdict(chunking), METHOD, K1, B, STOPWORDS, metadata.version("bm25s")]
    digest = hashlib.sha256(json.dumps(made_by).encode())
    root = corpus if corpus.is_dir() else corpus.parent
    for path in corpus_files(corpus):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()}\0{content}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """Give a folder beside `folder` that takes its place at the end, unless another process was faster."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".unfinished-{folder.name}-{os.urandom(4).hex()}")
    unfinished.mkdir()
    try:
        yield unfinished
        try:
            unfinished.rename(folder)
        except OSError:
            if not (folder / "meta.json").exists():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _bm25s() -> Any:
    try:
        import bm25s
    except ModuleNotFoundError as error:
        raise not_installed("retrieval", "bm25s", extra="eval", instead="evaluate with no-retrieval") from error
    return bm25s


class Coverage:
    """Judges passages by the words of the question: all of those that the corpus has at all must be among them."""

    def __init__(self, index: Bm25Index) -> None:
        self._index = index

    def __call__(self, question: Question, passages: Sequence[Passage]) -> bool:
        """Return whether `passages` together have every such word; a question without one is never covered."""
        asked = self._index.known(question.text)
        return bool(asked) and asked <= frozenset().union(*(self._index.known(one.searched) for one in passages))
