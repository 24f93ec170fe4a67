"""Whether a retrieval brought what was looked for, told without a model."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.evaluate.questions.question import Question
from trainwright.evaluate.retrieval.bm25 import Bm25Index
from trainwright.evaluate.retrieval.passages import Passage


class Coverage:
    """Judges passages by the words of the question: all of those that the corpus has at all must be among them."""

    def __init__(self, index: Bm25Index) -> None:
        self._index = index

    def __call__(self, question: Question, passages: Sequence[Passage]) -> bool:
        """Return whether `passages` together have every such word; a question without one is never covered."""
        asked = self._index.known(question.text)
        return bool(asked) and asked <= frozenset().union(*(self._index.known(one.searched) for one in passages))
