"""A question of a benchmark, and a set of them with all that is odd about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One question: multiple-choice where it has choices, else with a short answer in words."""

    id: str
    text: str
    choices: tuple[str, ...]
    answer: int | tuple[str, ...]
    """The number of the right choice, from 1; or the short answers that are accepted."""
    difficulty: str | None = None
    gold_passages: tuple[str, ...] = ()
    """Ids of passages, or of documents, that hold the answer, where they are known."""
    search: str | None = None
    """What is searched for, where that is not the question itself."""

    @property
    def right_answer(self) -> int | str:
        """The answer as results show it; of several short answers the first."""
        return self.answer if isinstance(self.answer, int) else self.answer[0]


@dataclass(frozen=True)
class Remark:
    """Something odd about a question."""

    question: str
    """Its id."""
    where: str
    """File and line."""
    what: str


@dataclass(frozen=True)
class Baseline:
    """The accuracy of always giving the same answer."""

    answer: int
    accuracy: float
    questions: int


@dataclass(frozen=True)
class QuestionSet:
    """All questions of a benchmark; none is dropped in silence."""

    questions: tuple[Question, ...]
    """Those that can be asked."""
    unusable: tuple[Question, ...] = ()
    """Those that cannot, such as a multiple-choice question without choices; each has a remark."""
    remarks: tuple[Remark, ...] = ()

    @property
    def everything(self) -> tuple[Question, ...]:
        """All questions, usable or not."""
        return self.questions + self.unusable

    def repeats(self) -> int:
        """Return how many questions ask, word for word, what another one asked already."""
        return sum(count - 1 for count in Counter(question.text for question in self.everything).values())

    def report(self) -> list[str]:
        """Return what to know about the set, one line each, every odd question by name."""
        lines = [f"{len(self.everything):,} questions, {len(self.questions):,} of them usable"]
        if repeats := self.repeats():
            lines.append(f"{repeats:,} repeat the text of another")
        for difficulty, baseline in constant_baselines(self.everything).items():
            lines.append(
                f"{difficulty or 'all'}: always answering {baseline.answer} is right in {baseline.accuracy:.1%} "
                f"of {baseline.questions:,}"
            )
        return lines + [f"{remark.where}: {remark.what}" for remark in self.remarks]


def constant_baselines(questions: Iterable[Question]) -> dict[str | None, Baseline]:
    """Return, by difficulty, the best accuracy that one constant answer reaches at multiple-choice questions."""
    answers: dict[str | None, Counter[int]] = {}
    for question in questions:
        if isinstance(question.answer, int):
            answers.setdefault(question.difficulty, Counter())[question.answer] += 1
    return {difficulty: _most_frequent(counts) for difficulty, counts in answers.items()}


def _most_frequent(counts: Counter[int]) -> Baseline:
    answer = min(counts, key=lambda number: (-counts[number], number))
    return Baseline(answer, counts[answer] / counts.total(), counts.total())
