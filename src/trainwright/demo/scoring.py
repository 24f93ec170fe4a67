"""How many questions the model answered right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Answer:
    """A question with what the model said; `story` is None where it was asked without one."""

    story: str | None
    question: str
    right_answer: str
    answer: str


def read_answers(path: Path) -> list[Answer]:
    """Return the answers in a file that `trainwright.train.answer_prompts` wrote."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Answer(row["story"], row["question"], row["right_answer"], row["answer"]) for row in rows]


def exact_match(answers: Sequence[Answer], *, with_story: bool) -> float:
    """Return the share of answers that are the right one to the letter, of those asked with a story or without."""
    asked = [answer for answer in answers if (answer.story is not None) == with_story]
    return sum(answer.answer == answer.right_answer for answer in asked) / len(asked)
